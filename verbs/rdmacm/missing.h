/* Their real declarations have arguments, which nobody looks at. */
#ifndef TP_VERBS_RDMACM_MISSING_H
#define TP_VERBS_RDMACM_MISSING_H

#define CM_MISSING(X) \
	X(rsocket) X(rbind) X(rlisten) X(raccept) X(rconnect) X(rshutdown) X(rclose) X(rrecv) X(rrecvfrom) X(rrecvmsg) X(rsend) X(rsendto) \
	X(rsendmsg) X(rread) X(rreadv) X(rwrite) X(rwritev) X(rpoll) X(rselect) X(rgetpeername) X(rgetsockname) X(rsetsockopt) X(rgetsockopt) \
	X(rfcntl) X(riomap) X(riounmap) X(riowrite) X(repoll_create1) X(repoll_ctl)
#define CM_DECLARE(name) long name(void);
CM_MISSING(CM_DECLARE)

#endif
