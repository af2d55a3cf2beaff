/* What every folder may use; base depends on nothing. */
#ifndef TP_BASE_BASE_H
#define TP_BASE_BASE_H

#include "base/clock.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/param.h"
#include "base/shm.h"
#include "base/socket.h"

#define TP_CACHE_LINE 64
#define TP_SECRET_BYTES 32
#define TP_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
/* One of the two is evaluated twice: no calls that do something, no ++, nothing that others change. */
#define TP_MIN(a, b) ((a) < (b) ? (a) : (b))
#define TP_MAX(a, b) ((a) > (b) ? (a) : (b))

static inline size_t tp_align_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
static inline size_t tp_div_up(size_t value, size_t unit) { return (value + unit - 1) / unit; }

/* Zeroed memory or NULL with a WARN that names what. */
void *tp_alloc(size_t count, size_t bytes, const char *what);

/* Keyed hash (BLAKE2b) and random bytes, by libsodium. */
void tp_secret_random(void *out, size_t bytes);
void tp_secret_mac(const uint8_t key[TP_SECRET_BYTES], const void *data, size_t bytes, uint8_t out[TP_SECRET_BYTES]);
bool tp_secret_equal(const uint8_t a[TP_SECRET_BYTES], const uint8_t b[TP_SECRET_BYTES]);   /* constant time */
/* 64-bit hash of bytes (not keyed, for signatures of calls and identities). */
uint64_t tp_hash64(const void *data, size_t bytes, uint64_t seed);
double tp_median(double *values, int count);      /* sorts them; 0 of none */

/* Who this machine is: NCCL_HOSTID, else boot id and host name and namespaces. Equal on all processes of a host. */
uint64_t tp_host_hash(void);
/* This process: its host, number, process namespace and start time. Different in a forked child. */
uint64_t tp_process_hash(void);
const char *tp_host_name(void);

/* What the processor has; TELPHER_ISA=scalar|avx2|avx512 lowers it (tests). */
enum tp_isa { TP_ISA_SCALAR, TP_ISA_AVX2, TP_ISA_AVX512 };
enum tp_isa tp_cpu_isa(void);
#define TP_CPU_WORDS 16             /* 1,024 processors */
/* The machine itself, whatever NCCL_HOSTID and containers make of it: who shares its processors. */
uint64_t tp_machine_hash(void);
/* The processors this process may run on; all zero on a machine with more than TP_CPU_WORDS can hold. */
void tp_cpu_mask(uint64_t mask[TP_CPU_WORDS]);
int tp_cpu_count(void);             /* processors this process may use */
/* "0-3,8" as a set; returns where it can't be read on: the text's end where all of it could. */
const char *tp_cpu_list_read(const char *text, uint64_t mask[TP_CPU_WORDS]);
const char *tp_cpu_list_format(const uint64_t mask[TP_CPU_WORDS], char *text, size_t bytes);

size_t tp_type_bytes(ncclDataType_t type);       /* 0 where there is no such type */
const char *tp_type_name(ncclDataType_t type);   /* "float", "bfloat16", as nccl-tests prints */
const char *tp_op_name(ncclRedOp_t op);          /* "sum" … ; "mulsum" above ncclNumOps */
const char *tp_result_name(ncclResult_t result); /* "ncclRemoteError" */

#endif
