/* Descriptions from inside: a tree of elements with attributes, in memory of its own that is freed as a whole. */
#ifndef TP_TOPO_DOC_H
#define TP_TOPO_DOC_H

#include "topo/topo.h"

#define TP_TOPO_MAX_PARTS 16             /* GPUs in one <pci> */

#define TP_DOC_MAX_ELEMENTS (1 << 17)
#define TP_DOC_MAX_ATTRIBUTES 64    /* of one element */

struct tp_attribute {
	const char *name, *value;
	struct tp_attribute *next;
};

struct tp_element {
	const char *name;
	int line;                       /* in the file; 0: not from a file */
	struct tp_attribute *attributes;
	struct tp_element *parent, *first, *last, *next;
};

struct tp_topo_doc {
	const char *name;               /* of the file, or what it was found in; for messages */
	struct tp_element *root;
	struct tp_doc_block *blocks;
	size_t elements, bytes;
};

ncclResult_t tp_doc_create(const char *name, const char *root, struct tp_topo_doc **out);
void *tp_doc_alloc(struct tp_topo_doc *doc, size_t bytes);      /* zeroed; NULL with a WARN */
/* NULL: out of memory, or more elements than there may be (logged). parent NULL: the root, if there is none yet. */
struct tp_element *tp_doc_add(struct tp_topo_doc *doc, struct tp_element *parent, const char *name);
/* Replaces the value that is there. */
ncclResult_t tp_doc_set(struct tp_topo_doc *doc, struct tp_element *element, const char *name, const char *value);
ncclResult_t tp_doc_setf(struct tp_topo_doc *doc, struct tp_element *element, const char *name, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
void tp_doc_unset(struct tp_element *element, const char *name);
void tp_doc_remove(struct tp_element *element);                 /* out of its parent; its memory stays the document's */

const char *tp_element_get(const struct tp_element *element, const char *name);     /* NULL: not there */
struct tp_element *tp_element_child(const struct tp_element *element, const char *name);    /* the first of that name */
struct tp_element *tp_element_child_with(const struct tp_element *element, const char *name, const char *attribute, const char *value);
/* Depth first; NULL at the end. Starts behind `at`, at the root for NULL. */
struct tp_element *tp_doc_walk(const struct tp_topo_doc *doc, const struct tp_element *at);
/* "x.xml:12: <gpu>", for messages; in a buffer of the caller's. */
#define TP_WHERE_BYTES 192
const char *tp_element_where(const struct tp_topo_doc *doc, const struct tp_element *element, char where[TP_WHERE_BYTES]);

/* Typed attributes. One that isn't there gives fallback; one that can't be read or lies outside min .. max is an error with its
 * place. Numbers: decimal, or hexadecimal with 0x. */
ncclResult_t tp_element_int(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, int64_t min, int64_t max,
	int64_t fallback, int64_t *out);
ncclResult_t tp_element_hex(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, uint64_t fallback, uint64_t *out);
ncclResult_t tp_element_real(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, double min, double max,
	double fallback, double *out);
/* "00000000,ffffffff": the last group holds processors 0 to 31. */
ncclResult_t tp_element_mask(const struct tp_topo_doc *doc, const struct tp_element *element, const char *name, uint64_t mask[TP_CPU_WORDS]);
/* A bus id; false where the text is none. The number is its digits read as one hexadecimal number, as NCCL has it. */
bool tp_bus_id_parse(const char *text, int64_t *out);
void tp_bus_id_text(int64_t bus, char text[20]);
/* "16.0 GT/s PCIe", "16 GT/s"; 0 for anything else: a speed that isn't known. */
float tp_pci_speed_parse(const char *text);

/* What files of real systems have twice, and can be meant in one way only, each with a WARN: a bridge written out again for another child, a device with the
 * bus id of a bridge, two ports of one number. Called by tp_topo_doc_parse. */
ncclResult_t tp_doc_mend(struct tp_topo_doc *doc);
/* What can't be true of any machine: one bus id, rank or port twice, numbers that are none. Called by tp_topo_doc_parse. */
ncclResult_t tp_doc_check(const struct tp_topo_doc *doc);

#endif
