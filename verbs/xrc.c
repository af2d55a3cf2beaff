/* XRC domains. Opened with a file they are one for all openers of that file in this process; opened without, private. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include "verbs/internal.h"

static struct tp_xrcd *domains;     /* named ones, under tp_card_lock */
static uint32_t last_id;

/* tp_card_lock is held. */
static struct tp_xrcd *find_locked(struct ibv_context *context, const struct stat *file)
{
	for (struct tp_xrcd *at = domains; at; at = at->next)
		if (at->dev == file->st_dev && at->ino == file->st_ino && at->ibv.context->device == context->device)
			return at;
	return NULL;
}

static struct ibv_xrcd *open_locked(struct ibv_context *context, const struct stat *file, int oflags)
{
	struct tp_xrcd *xrcd = file ? find_locked(context, file) : NULL;
	if (xrcd && (oflags & O_EXCL) && (oflags & O_CREAT)) {
		errno = EEXIST;
		return NULL;
	}
	if (!xrcd && !(oflags & O_CREAT)) {
		errno = file ? EAGAIN : EINVAL;
		return NULL;
	}
	if (xrcd) {
		xrcd->refs++;
		return &xrcd->ibv;
	}
	xrcd = tp_alloc(1, sizeof(*xrcd), "an XRC domain");
	if (!xrcd) {
		errno = ENOMEM;
		return NULL;
	}
	xrcd->ibv.context = context;
	xrcd->id = ++last_id;
	xrcd->refs = 1;
	if (file) {
		xrcd->named = true;
		xrcd->dev = file->st_dev;
		xrcd->ino = file->st_ino;
		xrcd->next = domains;
		domains = xrcd;
	}
	return &xrcd->ibv;
}

struct ibv_xrcd *tp_xrcd_open(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
	struct stat file;
	const uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	if (attr->comp_mask != needed || (attr->fd != -1 && fstat(attr->fd, &file))) {
		errno = attr->comp_mask != needed ? EINVAL : EBADF;
		return NULL;
	}
	pthread_mutex_lock(&tp_card_lock);
	struct ibv_xrcd *xrcd = open_locked(context, attr->fd == -1 ? NULL : &file, attr->oflags);
	pthread_mutex_unlock(&tp_card_lock);
	return xrcd;
}

int tp_xrcd_close(struct ibv_xrcd *ibv)
{
	struct tp_xrcd *xrcd = (struct tp_xrcd *)ibv;
	int error = 0;
	if (!tp_context_mine(ibv->context))
		return 0;       /* a forked child: it stays, inert */
	pthread_mutex_lock(&tp_card_lock);
	if (xrcd->refs == 1 && atomic_load_explicit(&xrcd->users, memory_order_acquire))
		error = EBUSY;
	else if (--xrcd->refs == 0 && xrcd->named)
		for (struct tp_xrcd **at = &domains; *at; at = &(*at)->next)
			if (*at == xrcd) {
				*at = xrcd->next;
				break;
			}
	bool last = !error && xrcd->refs == 0;
	pthread_mutex_unlock(&tp_card_lock);
	if (error)
		return TP_CARD_FAIL(error, "an XRC domain can't go while queues belong to it");
	if (last)
		free(xrcd);
	return 0;
}
