/* The line through measured times: alpha + bytes / beta. */
#ifndef TELPHER_PROBE_FIT_H
#define TELPHER_PROBE_FIT_H

#include <stdbool.h>
#include <stddef.h>

struct probe_fit { double alpha_us, beta_gbs, s_star; };       /* s_star: alpha x beta, in bytes */

/* Least squares of relative errors: a microsecond counts as much at 8 bytes as a millisecond at 8 MB. false: no line of positive slope. */
bool probe_fit(int count, const double *bytes, const double *us, struct probe_fit *out);

#endif
