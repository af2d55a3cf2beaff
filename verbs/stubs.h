/* What the generated stubs say. */
#ifndef TP_VERBS_STUBS_H
#define TP_VERBS_STUBS_H
#define TP_STUB __attribute__((visibility("default")))
/* A call of the ABI of 2006: sets errno to ENOSYS and says so once. Returns 0, which such calls give as NULL. */
long tp_stub_old(const char *name);
/* A call that a driver of real hardware makes: EOPNOTSUPP. Says so once. */
long tp_stub_refuse(const char *name);
#endif
