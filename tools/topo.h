/* Between the files of `telpher topo`. */
#ifndef TELPHER_TOPO_H
#define TELPHER_TOPO_H

#include "tools.h"
#include "topo/topo.h"

struct topo_machine {
	struct tp_topo_doc *doc;
	struct tp_topo *topo;
	struct tp_topo_policy policy;
	const char *name;
};
/* A file, a model's name, or NULL: this machine. quiet: what was assumed isn't said. 0, or 1 having said what is wrong. */
int topo_open(const char *name, bool quiet, struct topo_machine *out);
void topo_close(struct topo_machine *machine);
/* Is there such a file or model? And its description, completed; what was assumed goes to notes (NULL: nowhere). NULL: this machine. */
bool topo_is_known(const char *name);
ncclResult_t topo_load(const char *name, bool cores, FILE *notes, struct tp_topo_doc **out);
int topo_show(const struct topo_machine *machine, FILE *out);
int topo_json(const struct topo_machine *machine, FILE *out);
int topo_matrix(const struct topo_machine *machine, FILE *out);
int topo_channels(const struct topo_machine *machine, FILE *out);
int topo_explain(const struct topo_machine *machine, const char *from, const char *to, FILE *out);
int topo_diff(const struct topo_machine *a, const struct topo_machine *b, FILE *out);    /* 1: they differ */
int topo_record(const char *path, const char *from, const char *to, const char *const *values, int nvalues);
int topo_export(const struct topo_machine *machine, FILE *out);
/* A line a hop, with what is said behind the link marked (of topo->links; -1: none). */
void topo_print_hops(const struct tp_topo *topo, const struct tp_topo_path *path, int32_t marked, const char *mark, FILE *out);
void topo_print_measured(const struct topo_machine *machine, int32_t a, int32_t b, FILE *out);
int topo_draw(const struct topo_machine *machine, bool html, FILE *out);

/* "PCIe 5.0 x16", "NVLink x18", "xGMI x4", "C2C", … */
void topo_link_text(const struct tp_topo *topo, const struct tp_topo_link *link, char *text, size_t bytes);
const char *topo_fabric_name(enum tp_net_kind kind);

#endif
