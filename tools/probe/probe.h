/* `telpher probe`: what its commands share. It measures what an RDMA card does and what each way to it costs, with nothing of the
 * collectives in between.
 *
 *   write       one block from here to there and back again: write, read, send (options, client, server)
 *   sweep       the same for every size, draw: its picture, fit: alpha and beta of it
 *   paths       TCP, RDMA staged, GPUDirect: copies, bounds, what was measured
 *   reg, connect, cost, matrix      registration, connections, collectives, every GPU by every NIC
 *
 *   wire        records of the exchange      meet      the exchange itself, over TCP
 *   port        device, port and GID         memory    host and GPU memory, registered, filled, verified
 *   link        queue pairs                  job       data over them
 *
 * Whoever detects an error says it, once, through probe_fail; the others pass its status on. */
#ifndef TELPHER_PROBE_H
#define TELPHER_PROBE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "tools.h"

/* What options of numbers hold until they are given: none that could be meant. */
#define PROBE_UNSET INT_MIN

int probe_write(int argc, char **argv);
int probe_paths(int argc, char **argv);
int probe_reg(int argc, char **argv);
int probe_connect(int argc, char **argv);
int probe_cost(int argc, char **argv);
int probe_matrix(int argc, char **argv);

/* "telpher probe write: …" to stderr; returns 1. The text stays, for the peer. */
int probe_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same with the last error of what was called, `what` in front where there is one. */
int probe_fail_below(const char *what);
const char *probe_last_error(void);         /* "": none yet */
void probe_note(const char *format, ...) __attribute__((format(printf, 1, 2)));     /* to stderr, no error */
/* What the command is called in messages ("write"). */
void probe_set_name(const char *name);
int probe_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));     /* returns TOOL_USAGE */

double probe_now_us(void);
/* Three digits, never an exponent: "5.61", "0.00124", "12300". */
const char *probe_digits(double value, char text[32]);
const char *probe_size_text(size_t bytes, char text[32]);     /* "64 KiB" */
/* Prints and frees; 1 where it can't. */
int probe_print_json(cJSON *json);

#endif
