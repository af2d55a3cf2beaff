/* What net.c (connections) and net_pump.c (chunks) share; internal.h has what the rest of link may call. */
#ifndef TP_LINK_NET_LINK_H
#define TP_LINK_NET_LINK_H

#include "link/internal.h"

/* A chunk travels as one message: these fields of its slot, then its data. They lie next to each other in a slot, so an inline chunk is one piece of memory. */
struct tp_net_chunk { uint32_t bytes, tag, kind; };
#define TP_NET_KIND_BYE 0x627965u       /* the sender leaves in good order: no more chunks will come */
#define TP_NET_LENT_PARTS 2             /* of a chunk that is lent: header with its first bytes, and the rest where it lies */
#define TP_NET_LINK_TAG 0x54504c        /* the transport's tag: the order tells chunks apart */
_Static_assert(offsetof(struct tp_slot, data) == offsetof(struct tp_slot, bytes) + sizeof(struct tp_net_chunk), "a chunk must be one piece");

enum tp_net_state {
	TP_NET_CONNECTING,          /* sender: under way; receiver: the sender hasn't come yet */
	TP_NET_READY,
	TP_NET_LEFT,                /* receiver: the sender said goodbye */
	TP_NET_LOST,                /* receiver: the connection broke */
	TP_NET_RECALLED             /* sender: closed before its time (tp_links_recall) */
};

/* Memory that the user registered, and what each sending end's transport gave for it. What is deregistered while some of it is on its way (an
 * operation has failed) goes when that has ended. */
struct tp_net_grant {
	struct tp_net_grant *next;
	struct tp_net_buffer *buffer;
	struct tp_link_net *end;
	void *mhandle;
	uint32_t out;               /* chunks on loan */
};
struct tp_net_buffer {
	struct tp_net_buffer *next;
	uintptr_t begin, end;
	struct tp_net_grant *grants;
	bool refused;               /* a transport can't register it */
	bool gone;                  /* deregistered */
};

/* The proxy's side of one end. */
struct tp_link_net {
	struct tp_net_links *nets;
	struct tp_link *link;
	bool sending;
	int from, to, channel, lane_class;
	enum tp_net_state state;
	void *connecting, *comm;    /* of the transport */
	void *mhandle;
	unsigned char *ring;        /* head's line, then the slots */
	size_t ring_bytes;
	unsigned char *device_ring; /* GPU ranks: the same for kernels */
	uint32_t posted;            /* chunks handed to the transport (sender), slots that wait for one (receiver) */
	uint32_t finished;          /* of these, done */
	uint32_t quiet;             /* receiver: looks since something came */
	void *requests[TP_NET_MAX_REQUESTS];
	uint64_t lost_ms;           /* LOST: since when */
	struct tp_net_grant *grant; /* the last one that was used */
	struct tp_net_grant *lent[TP_NET_MAX_REQUESTS];     /* of the chunks in requests; NULL: not lent, or nothing to give back */
	uint32_t lent_to;           /* all chunks that are lent come before this one */
};

struct tp_net_guest { struct tp_net_hello hello; void *comm; };

/* GPU ranks: pinned memory for rings, in pieces of many, since each takes time to pin. Given back at the end. */
struct tp_net_pool { struct tp_gpu_memory memory; size_t used; struct tp_net_pool *next; };

struct tp_net_links {
	struct tp_boot *boot;
	const struct tp_gpu *gpu;   /* NULL: host ranks */
	struct tp_net_pool *pool;
	const struct tp_net_ops *ops;
	int dev, ndevs, nchannels;
	bool forced;                /* the user names the network: no other will do */
	char via[48];
	size_t capacity, stride;
	uint32_t nslots;
	void *listener;
	unsigned char *handles;     /* [nranks * TP_NET_HANDLE_BYTES] */
	struct tp_link_net **ends;
	int nends, size_ends;
	uint32_t turn;              /* calls of progress */
	uint64_t patience_ms;       /* at the end: what is left to wait for peers that take nothing */
	int nexpected;              /* receiving ends whose sender hasn't come */
	bool lends;                 /* chunks may be sent from where they lie */
	struct tp_net_buffer *buffers;
	bool told_slots, told_late, told_copied;    /* what is said once: see net_lend.c */
	struct tp_net_guest *early; /* who came before this rank asked for the link */
	int nearly, size_early;
};

/* net_lend.c: chunks that are sent from where they lie. */
void tp_net_grant_back(struct tp_net_grant *grant);         /* a chunk is through */
void tp_net_grants_drop(struct tp_link_net *end);           /* its connection is closed */
/* Registering an end's ring has taken the time since. */
void tp_net_tell_slots(struct tp_net_links *nets, uint64_t since_ns, const struct tp_link_net *end);
/* net_ring.c: the memory of an end's ring, zeroed; fills link's slots, head and sizes. */
ncclResult_t tp_net_ring_make(struct tp_link_net *end, struct tp_link *link);
void tp_net_ring_free(struct tp_link_net *end);
void tp_net_rings_destroy(struct tp_net_links *nets);
/* GPU ranks, sender: counts what the kernel has published since. */
void tp_net_link_see_published(struct tp_link_net *end);

/* create without the gathering: the handle is this rank's; the caller fills in nets->handles. */
ncclResult_t tp_net_links_listen(struct tp_boot *boot, const struct tp_net_links_options *options, unsigned char *handle,
	struct tp_net_links **out);
/* Sends what is published, or posts receives and publishes what came. */
ncclResult_t tp_net_link_pump(struct tp_link_net *end, bool *moved);
/* Receiver, LOST: a sender that ends without a goodbye, its work done, is no error for one who has all that it needs. So what
 * came before is used up first, and somebody who knows why it ended (a death is seen in milliseconds) may speak first. */
ncclResult_t tp_net_link_mourn(struct tp_link_net *end);
/* A sender's last word, where nothing else is under way. */
void tp_net_link_say_bye(struct tp_link_net *end);

#endif
