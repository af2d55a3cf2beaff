/* Other people's transports: NET plug-ins that NCCL_NET_PLUGIN names, as one transport of ours.
 *
 * A plug-in is a library with a table of functions (abi.h). Those named are loaded in order; the first that can be used is the
 * process's plug-in from then on, and all others are out, as with NCCL. A loaded library stays loaded.
 *
 * Its listener takes one connection, and its handle must come to the peer, so each connection begins with one of the Socket
 * transport's, which proves that both belong together: over it the acceptor sends a fresh listener's handle (struct tp_plug_offer).
 * It stays open: its end tells that the peer has gone, which not every plug-in does.
 *
 *   load     libraries, their tables, which is used      calls   one function a call, whatever the version
 *   meet     listen, connect, accept                     data    requests, the end
 *
 * Whatever a plug-in does that it may not do is an error that names the plug-in, the function and what is wrong. */
#ifndef TP_NET_PLUGIN_PLUGIN_H
#define TP_NET_PLUGIN_PLUGIN_H

#include "net/net.h"
#include "net/plugin/abi.h"

#define TP_PLUG_MAX 14              /* as many as NCCL takes */
#define TP_PLUG_MAX_DEVICES 256
#define TP_PLUG_NAME_BYTES 64
#define TP_PLUG_WHY_BYTES 512

enum tp_plug_state { TP_PLUG_UNTRIED, TP_PLUG_LOADED, TP_PLUG_USABLE, TP_PLUG_FAILED };

struct tp_plug {
	char asked[256];                /* as NCCL_NET_PLUGIN names it */
	char file[256];                 /* what was opened */
	char name[TP_PLUG_NAME_BYTES];  /* its own */
	char first_name[TP_PLUG_NAME_BYTES];    /* before init: some are called by what they have chosen then */
	enum tp_plug_state state;
	char why[TP_PLUG_WHY_BYTES];    /* FAILED */
	int version;
	union { const void *any; const struct tp_abi_v8 *v8; const struct tp_abi_v9 *v9; const struct tp_abi_v10 *v10; const struct tp_abi_v11 *v11; } table;
	/* those that are the same in all versions */
	TP_ABI_ACCEPT;
	TP_ABI_REG_MR;
	TP_ABI_REG_DMABUF;
	TP_ABI_DEREG_MR;
	TP_ABI_IFLUSH;
	TP_ABI_REST;
	void *library;
	void *context;                  /* v11: of the process */
	int ndevs;
	struct tp_net_properties properties[TP_PLUG_MAX_DEVICES];
};

/* ---- load ---- */
/* The plug-in to use, or NULL. name: only one of that name; NULL: any. asked: its failure is the caller's to tell. */
const struct tp_net_ops *tp_net_plugin_choose(const char *name, bool asked);
/* By a network of this library. */
bool tp_plug_is_taken(const char *name);
/* Is there one of this name, usable or not? */
bool tp_net_plugin_exists(const char *name);
/* NULL: it is usable, or there is none of that name. */
const char *tp_net_plugin_why_not(const char *name);
/* "Foo (usable), bar (not usable: …), ": nothing where none is named. The length. */
size_t tp_net_plugin_list(char *text, size_t bytes);
void tp_net_plugin_forget(void);    /* tests: everything is looked for anew; no connection may be open */

/* ---- calls ---- */
/* NULL, or which of what every table has at once is missing. */
const char *tp_plug_bind(struct tp_plug *plug, const void *table, int version);
/* After init: there are plug-ins that only then know whose functions they have. */
ncclResult_t tp_plug_complete(struct tp_plug *plug);
ncclResult_t tp_plug_init(struct tp_plug *plug, uint64_t comm_id, void **context);
void tp_plug_finalize(struct tp_plug *plug, void *context);
ncclResult_t tp_plug_devices(struct tp_plug *plug);     /* count and properties, checked */
ncclResult_t tp_plug_call_listen(struct tp_plug *plug, void *context, int dev, void *handle, void **listener);
ncclResult_t tp_plug_call_connect(struct tp_plug *plug, void *context, int dev, void *handle, void **send_comm, struct tp_abi_device_handle **device);
ncclResult_t tp_plug_call_isend(struct tp_plug *plug, void *comm, const void *data, size_t bytes, int tag, void *mhandle, void **request);
ncclResult_t tp_plug_call_irecv(struct tp_plug *plug, void *comm, int n, void *const *data, const size_t *bytes, const int *tags, void *const *mhandles,
	void **request);
/* This thread's calls concern a peer that may have gone already, and that is no news: the plug-in's warnings become INFO. */
void tp_plug_be_quiet(bool quiet);
/* Logs what function gave; which: "rank 0 -> rank 1 [channel 2]" or "". What is no error of NCCL's becomes ncclInternalError. */
ncclResult_t tp_plug_failed(const struct tp_plug *plug, const char *function, const char *which, ncclResult_t result);

/* ---- connections ---- */
extern struct tp_net_ops tp_net_plugged;
struct tp_plug *tp_plug_current(void);

/* Contexts (v11), one a communicator, shared by its connections in this process. */
ncclResult_t tp_plug_context_get(struct tp_plug *plug, uint64_t comm_hash, void **context);
void tp_plug_context_put(struct tp_plug *plug, uint64_t comm_hash);

struct tp_plug_comm;
struct tp_plug_request { struct tp_plug_comm *comm; bool busy; int n; void *inner; size_t capacity[TP_NET_MAX_RECVS]; };

/* A registration. A plug-in needs the connection to undo it, so what is left when it closes is undone then: comm is NULL afterwards. */
struct tp_plug_memory { struct tp_plug_comm *comm; void *inner; struct tp_plug_memory *next; };

struct tp_plug_comm {
	struct tp_plug *plug;
	struct tp_plug_memory *memory;
	bool sending, leaving;
	int dev, fd;
	void *inner;
	uint64_t comm_hash;
	char which[64], peer[TP_ADDR_TEXT];
	struct tp_plug_request requests[TP_ABI_MAX_REQUESTS];
	uint32_t next;
	uint32_t looks, looks_since;
	uint64_t gone_ms;               /* since when the peer's end of the TCP connection is closed */
	ncclResult_t error;             /* the first; it stays */
};

/* Takes fd and inner over. */
bool tp_plug_has_closed(int fd);     /* the peer, its end of this TCP connection */
ncclResult_t tp_plug_comm_create(struct tp_plug *plug, bool sending, int dev, const struct tp_net_hello *who, int fd, void *inner, struct tp_plug_comm **out);
ncclResult_t tp_plug_listen(int dev, void *handle, void **listener);
ncclResult_t tp_plug_connect(int dev, const void *handle, const struct tp_net_hello *hello, void **state, void **send_comm);
void tp_plug_cancel_connect(void *state);
ncclResult_t tp_plug_accept(void *listener, const struct tp_net_hello *expect, struct tp_net_hello *who, void **recv_comm);
int tp_plug_poll_connect_fds(void *state, int *fds, uint32_t *events, int max);
int tp_plug_poll_listen_fds(void *listener, int *fds, uint32_t *events, int max);
ncclResult_t tp_plug_close_listen(void *listener);

/* What the acceptor sends: a listener's handle, or why there is none. */
#define TP_PLUG_OFFER_VERSION 1
struct tp_plug_offer {
	uint8_t magic[8];
	uint16_t version, abi;          /* abi: of the plug-in's table */
	uint32_t refused;               /* 1: text says why */
	char name[TP_PLUG_NAME_BYTES];
	uint8_t handle[TP_ABI_HANDLE_BYTES];
	char text[256];
} __attribute__((packed));
void tp_plug_offer_fill(struct tp_plug_offer *offer, const struct tp_plug *plug);
/* NULL: well-formed and of this plug-in (name); else what is wrong. Makes texts end. */
const char *tp_plug_offer_check(struct tp_plug_offer *offer, const char *name, char *why, size_t bytes);

#endif
