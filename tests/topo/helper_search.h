/* Machines of tests/topo/data, some with a part changed, and their channels. */
#ifndef TESTS_TOPO_HELPER_SEARCH_H
#define TESTS_TOPO_HELPER_SEARCH_H

#include "topo/helper_topo.h"
#include "topo/search.h"

/* The text of a file; the caller frees it. Fails the test where it can't be read. */
char *helper_file(const char *path);
/* tests/topo/data/NAME with the first `from` replaced by `to` (both NULL: as it is). */
struct tp_topo *helper_machine(const char *name, const char *from, const char *to, bool multi_host);
/* The nth `from` (from 0) in the text replaced, in memory of its own; NULL: there are fewer. */
char *helper_replace(const char *text, const char *from, int nth, const char *to);
/* Searches and checks, with tp_channels_check and apart from it: along the paths of the graph no link carries more than it has. */
struct tp_channels *helper_channels(const struct tp_topo *topo, enum tp_pattern pattern, bool multi_host);
double helper_total(const struct tp_channels *channels);       /* nchannels x bw_inter */
/* The text of the first finding of a kind; NULL: there is none. */
const char *helper_found(const struct tp_channels *channels, enum tp_finding_kind kind);
struct tp_topo_policy helper_policy(bool multi_host);

#endif
