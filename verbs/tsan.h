/* What the thread sanitizer can't know by itself; nothing in other builds. */
#ifndef TP_VERBS_TSAN_H
#define TP_VERBS_TSAN_H

#if defined(__has_feature)
#define TP_HAS_FEATURE(what) __has_feature(what)
#else
#define TP_HAS_FEATURE(what) 0
#endif
#if defined(__SANITIZE_THREAD__) || TP_HAS_FEATURE(thread_sanitizer)
#include <sanitizer/tsan_interface.h>
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
static inline void tp_tsan_release(void *what) { __tsan_release(what); }
static inline void tp_tsan_acquire(void *what) { __tsan_acquire(what); }
static inline void tp_tsan_ignore_reads(void) { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
static inline void tp_tsan_heed_reads(void) { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
static inline void tp_tsan_release(void *what) { (void)what; }
static inline void tp_tsan_acquire(void *what) { (void)what; }
static inline void tp_tsan_ignore_reads(void) { }
static inline void tp_tsan_heed_reads(void) { }
#endif

#endif
