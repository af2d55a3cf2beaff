/* What net.c (connections) and net_pump.c (chunks) share; internal.h has what the rest of link may call. */
#ifndef TP_LINK_NET_LINK_H
#define TP_LINK_NET_LINK_H

#include "link/internal.h"

/* A chunk travels as one message: these fields of its slot, then its data. They lie next to each other in a slot, so an inline chunk is one piece of memory. */
struct tp_net_chunk { uint32_t bytes, tag, kind; };
#define TP_NET_BYE_BYTES 4              /* a message of so many is none: the sender leaves in good order, no more chunks will come */
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

/* Device memory and the DMA-BUFs of it, by whether they are for PCIe (data direct), -1: there is none (yet). closed: nor will there be one. beyond: pages
 * of it are shared with what is no part of its allocation, so CUDA may refuse one. */
struct tp_net_shown {
	void *memory;
	size_t bytes;
	uint64_t id;
	int fds[2];
	bool closed, beyond;
	int nheld;
	void *held[TP_LINK_SEATS_MAX];      /* by devices of the transport */
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
	bool gone;                  /* deregistered; of GPU ranks, what kernels that run have found before goes on (tp_net_loans_settle) */
	/* GPU ranks. */
	bool freed;                 /* without being deregistered: other memory is there now */
	bool listed;                /* index is in the table */
	uint64_t id;                /* CUDA's, of the allocation */
	uint32_t index;
	struct tp_net_shown shown;
};

static inline bool tp_net_buffer_spans(const struct tp_net_buffer *buffer, const void *memory, size_t bytes)
{
	uintptr_t at = (uintptr_t)memory;
	return !buffer->freed && at >= buffer->begin && at <= buffer->end && bytes <= buffer->end - at;
}

static inline bool tp_net_buffer_covers(const struct tp_net_buffer *buffer, const void *memory, size_t bytes) { return !buffer->gone && tp_net_buffer_spans(buffer, memory, bytes); }

/* It did when a kernel that may still lend it looked. */
static inline bool tp_net_buffer_lingers_over(const struct tp_net_buffer *buffer, const void *memory, size_t bytes) { return buffer->gone && tp_net_buffer_spans(buffer, memory, bytes); }

/* The proxy's side of one end. */
struct tp_link_net {
	struct tp_net_links *nets;
	struct tp_link *link;
	bool sending;
	int from, to, channel, lane_class;
	int dev;                    /* of the transport, at this end */
	enum tp_net_state state;
	void *connecting, *comm;    /* of the transport */
	void *mhandle;
	unsigned char *ring;        /* head's line, then the slots, or their flags */
	size_t ring_bytes;
	bool enlarged;              /* the ring lies in large pages, or is none of ours to change */
	unsigned char *device_ring; /* GPU ranks: the same for kernels */
	unsigned char *far_slots;   /* GPU ranks: in device memory, never touched by the host; NULL: they are in the ring */
	size_t far_bytes;
	struct tp_net_shown *far;   /* what they lie in */
	bool far_refused;           /* there was no device memory for them */
	unsigned char *flags;       /* a slot's {seq, bytes} every flag_stride bytes: in the slots, or alone */
	size_t flag_stride;
	unsigned char *window;      /* GPU ranks with GDRCopy: what kernels poll, in device memory as the host stores to it: flags, or the head */
	uint64_t device_window;     /* the same for kernels */
	uint32_t sizes[TP_NET_MAX_REQUESTS];        /* receiver: of chunks that have landed */
	bool flushes;               /* what arrived is flushed before it is published */
	bool leaves;                /* receiver: the goodbye came, and flushes go on */
	uint32_t posted;            /* chunks handed to the transport (sender), slots that wait for one (receiver) */
	uint32_t landed;            /* receiver: of these, arrived */
	uint32_t finished;          /* done: receiver: flushed, too */
	uint32_t quiet;             /* receiver: looks since something came */
	void *requests[TP_NET_MAX_REQUESTS];
	uint64_t lost_ms;           /* LOST: since when */
	struct tp_net_grant *grant; /* the last one that was used */
	struct tp_net_grant *lent[TP_NET_MAX_REQUESTS];     /* of the chunks in requests; NULL: not lent, or nothing to give back */
	void *flush[TP_NET_MAX_REQUESTS];   /* of chunks that have landed; NULL: it is over */
	void *headers_mhandle;      /* sender that kernels have lent to: of the headers, which aren't in the slots */
	uint32_t lent_to;           /* all chunks that are lent come before this one */
};

struct tp_net_guest { struct tp_net_hello hello; void *comm; };

/* GPU ranks: pinned memory for rings, in pieces of many, since each takes time to pin. Given back at the end. */
struct tp_net_pool { struct tp_gpu_memory memory; size_t used; struct tp_net_pool *next; };

/* The same of device memory, registered with a device of the transport. */
struct tp_net_far { struct tp_gpu_memory memory; size_t used; int dev; struct tp_net_shown shown; struct tp_net_far *next; };

/* And of words that kernels poll. */
struct tp_net_near { struct tp_gpu_mapped window; size_t used; struct tp_net_near *next; };

struct tp_net_links {
	struct tp_boot *boot;
	const struct tp_gpu *gpu;   /* NULL: host ranks */
	struct tp_net_pool *pool;
	struct tp_net_far *far;
	struct tp_net_near *near;
	bool no_windows;            /* they were tried, and couldn't be had */
	struct tp_links_gdr *gdr;   /* [ndevs]; NULL: all slots in host memory */
	const struct tp_net_ops *ops;
	int dev, ndevs, nchannels;  /* dev: the first in use */
	bool may_choose;            /* any device will do */
	int most_devs;              /* agreed: that any rank may choose among; 1: nothing to choose */
	int cross;                  /* NCCL_CROSS_NIC, agreed */
	void *seats;                /* net_seat.c: [nranks] of struct tp_net_seats, seats_stride bytes each; NULL: channels take turns with all devices */
	size_t seats_stride;
	struct { char text[48]; } *vias;    /* [most_devs], where there are seats */
	bool forced;                /* the user names the network: no other will do */
	char via[48];
	size_t capacity, stride;
	uint32_t nslots;
	void *listeners[1 + TP_LINK_SEATS_MAX];    /* the first is dev's as it was when handles were gathered */
	int nlisteners;
	unsigned char *handles;     /* [nranks * TP_NET_HANDLE_BYTES] */
	struct tp_link_net **ends;
	int nends, size_ends;
	uint32_t turn;              /* calls of progress */
	uint64_t patience_ms;       /* at the end: what is left to wait for peers that take nothing */
	int nexpected;              /* receiving ends whose sender hasn't come */
	bool lends;                 /* chunks may be sent from where they lie */
	bool pins;                  /* the transport pins what is registered */
	struct tp_net_buffer *buffers;
	struct tp_net_loans *loans; /* GPU ranks that lend: net_loans.c */
	bool told_slots, told_late, told_copied;    /* what is said once: see net_lend.c */
	struct tp_net_guest *early; /* who came before this rank asked for the link */
	int nearly, size_early;
};

/* What a rank tells of its devices, with room for as many as any has. */
struct tp_net_seats {
	int32_t near, count, nrings;
	uint8_t out[TP_LINK_RINGS_MAX], in[TP_LINK_RINGS_MAX];
	struct tp_link_seat list[];
};
/* net_seat.c: the device that this rank's end of a link uses, and where a sender finds the receiver. */
int tp_net_links_device(const struct tp_net_links *nets, int channel, int from, int to);
const unsigned char *tp_net_links_handle(const struct tp_net_links *nets, int channel, int to);
/* net_lend.c: chunks that are sent from where they lie. */
void tp_net_grant_back(struct tp_net_grant *grant);         /* a chunk is through */
void tp_net_grants_drop(struct tp_link_net *end);           /* its connection is closed */
/* NULL: that memory isn't registered, or can't be with this connection. May register what the program has. */
struct tp_net_grant *tp_net_grant_for(struct tp_link_net *end, const void *memory, size_t bytes);
/* To the list, with a grant of each connection that there is. */
void tp_net_buffer_add(struct tp_net_links *nets, struct tp_net_buffer *buffer);
/* Gives back the grants that nothing is sent by. */
void tp_net_buffer_drop_idle(struct tp_net_buffer *buffer);
/* Out of the list, without grants; then, without a lock that the engine needs, its memory. */
void tp_net_buffer_unlist(struct tp_net_links *nets, struct tp_net_buffer *buffer);
void tp_net_buffer_free(const struct tp_net_links *nets, struct tp_net_buffer *buffer);
/* net_loans.c: what kernels lend. open: once it is known which devices read GPU memory. */
ncclResult_t tp_net_loans_open(struct tp_net_links *nets);
void tp_net_loans_close(struct tp_net_links *nets);
void tp_net_loans_lock(struct tp_net_links *nets);          /* around changes of the list and of its buffers' listed, gone and freed */
void tp_net_loans_unlock(struct tp_net_links *nets);
void tp_net_loans_forget(struct tp_net_links *nets, const struct tp_net_buffer *buffer);
void tp_net_loans_refuse(struct tp_net_links *nets);        /* a connection can't register one of them: its entry goes when CUDA may be called */
/* A slot that a kernel has lent is about to be sent: its header gets the grant, or, where there is none, the slot gets the data. */
ncclResult_t tp_net_loan_open(struct tp_link_net *end, struct tp_slot *header, struct tp_slot *slot);
void tp_net_loan_out(struct tp_link_net *end, struct tp_net_grant *grant, uint32_t bytes);     /* and is on its way */
/* Registering an end's ring has taken the time since. */
void tp_net_tell_slots(struct tp_net_links *nets, uint64_t since_ns, const struct tp_link_net *end);
/* net_ring.c: the memory of an end's ring, zeroed; fills link's slots, head and sizes. */
ncclResult_t tp_net_ring_make(struct tp_link_net *end, struct tp_link *link);
/* A large chunk passes through it, the first. */
void tp_net_ring_enlarge(struct tp_link_net *end);
/* To kernels that poll a window: a receiver's slot is full; a sender's slots below this are free. */
void tp_net_ring_tell_full(const struct tp_link_net *end, uint32_t index, uint32_t bytes);
void tp_net_ring_tell_head(const struct tp_link_net *end, uint32_t head);
/* With its connection. */
ncclResult_t tp_net_ring_register(struct tp_link_net *end);
void tp_net_ring_free(struct tp_link_net *end);
void tp_net_rings_destroy(struct tp_net_links *nets);
/* net_gdr.c: slots in device memory, where the card reaches it: far_slots, else nothing. */
void tp_net_gdr_take(struct tp_link_net *end, size_t bytes);
void tp_net_gdr_give_up(struct tp_link_net *end);          /* far_refused: nor will there be any */
ncclResult_t tp_net_gdr_register(struct tp_link_net *end);
/* Device memory for connections: CUDA is asked for DMA-BUFs when it is held, or first registered, and never again. */
void tp_net_gdr_show(void *memory, size_t bytes, uint64_t id, struct tp_net_shown *out);
/* Part of it, with an end's connection. */
ncclResult_t tp_net_gdr_register_memory(const struct tp_link_net *end, struct tp_net_shown *shown, void *memory, size_t bytes, void **mhandle);
/* Does some device read GPU memory to send it? */
bool tp_net_gdr_sends(const struct tp_net_links *nets);
/* Devices that read GPU memory by which this rank sends to other hosts, or may come to: how many. */
int tp_net_gdr_send_devices(const struct tp_net_links *nets, int *devs, int most);
/* Registers all of it with devices, ahead of connections over them, which need no DMA-BUF then. The devices of before the one that failed hold it, too. */
ncclResult_t tp_net_gdr_hold(const struct tp_net_links *nets, const int *devs, int ndevs, struct tp_net_shown *shown);
void tp_net_gdr_let_go(const struct tp_net_links *nets, struct tp_net_shown *shown);
/* Do its pages lie in its allocation? */
bool tp_net_gdr_fits(const struct tp_net_shown *shown, const struct tp_gpu_pointer *p);
/* Why none of its devices reads GPU memory; NULL: one does. */
const char *tp_net_gdr_why_not(const struct tp_net_links *nets);
void tp_net_gdr_close(struct tp_net_links *nets);
/* GPU ranks, sender: counts what the kernel has published since. */
void tp_net_link_see_published(struct tp_link_net *end);
/* Sender: memory is read, or will be, that the program may want back. */
bool tp_net_link_has_loan(struct tp_link_net *end);
/* GPU ranks, sender: kernels have published chunks of [begin, finish) that aren't under way yet. */
bool tp_net_link_owes(struct tp_link_net *end, uintptr_t begin, uintptr_t finish);

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
