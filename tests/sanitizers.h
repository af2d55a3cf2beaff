/* What the tests are built with: each name is 1 or 0.
 *
 * A child forked from a process with several threads finds the sanitizers' own locks (of their allocator, their list of threads, their notes on
 * FILEs) as other threads held them: now and then it would wait for ever, where without them it can't. Tests of that kind skip where SANITIZED. */
#ifndef TP_TESTS_SANITIZERS_H
#define TP_TESTS_SANITIZERS_H

#if defined(__has_feature)
#define SANITIZERS_HAS(what) __has_feature(what)
#else
#define SANITIZERS_HAS(what) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || SANITIZERS_HAS(address_sanitizer)
#define SANITIZED_ADDRESS 1
#else
#define SANITIZED_ADDRESS 0
#endif
#if defined(__SANITIZE_THREAD__) || SANITIZERS_HAS(thread_sanitizer)
#define SANITIZED_THREAD 1
#else
#define SANITIZED_THREAD 0
#endif
#define SANITIZED (SANITIZED_ADDRESS || SANITIZED_THREAD)

#endif
