/* Expectations of a machine: a list such as "net=ib gdr=on p2p=nvlink nics>=8", or a file that was written on a good day. A key names
 * what is looked at; each look gives observations (one a GPU, a pair, a port), and all of them must be as expected. What isn't is
 * named with what was found and why. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "topo/build.h"
#include "topo/search.h"
#include "watch/watch.h"

struct observation {
	const char *word;               /* NULL: a number */
	double number;
	char subject[160];
	const char *why;                /* may be NULL */
};

struct look {
	const struct tp_topo *topo;
	const struct tp_topo_policy *policy;
	void (*see)(struct look *look, const struct observation *o);
	void *arg;
};

__attribute__((format(printf, 5, 6)))
static void see(struct look *look, const char *word, double number, const char *why, const char *format, ...)
{
	struct observation o = { .word = word, .number = number, .why = why };
	va_list list;
	va_start(list, format);
	vsnprintf(o.subject, sizeof(o.subject), format, list);
	va_end(list);
	look->see(look, &o);
}

static ncclResult_t look_gpus(struct look *l)
{
	see(l, NULL, l->topo->count[TP_TOPO_GPU], NULL, "the machine");
	return ncclSuccess;
}

static ncclResult_t look_nics(struct look *l)
{
	see(l, NULL, l->topo->count[TP_TOPO_NET], NULL, "the machine");
	return ncclSuccess;
}

static ncclResult_t look_nvlinks(struct look *l)
{
	for (int32_t g = 0; g < l->topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(l->topo, TP_TOPO_GPU, g);
		see(l, NULL, gpu->gpu.nvlinks, NULL, "%s", gpu->name);
	}
	return ncclSuccess;
}

static ncclResult_t look_p2p(struct look *l)
{
	const struct tp_topo *topo = l->topo;
	for (int32_t a = 0; a < topo->count[TP_TOPO_GPU]; a++) {
		for (int32_t b = 0; b < topo->count[TP_TOPO_GPU]; b++) {
			const struct tp_topo_node *x = tp_topo_node_of(topo, TP_TOPO_GPU, a), *y = tp_topo_node_of(topo, TP_TOPO_GPU, b);
			struct tp_topo_p2p p;
			if (a == b || x->host != y->host) continue;
			TP_TRY(tp_topo_decide_p2p(topo, l->policy, x->index, y->index, &p));
			const char *word = !p.use ? "none" : p.type == TP_PATH_NVL ? "nvlink" : p.type == TP_PATH_NVB ? "relay" : p.type == TP_PATH_C2C ? "c2c" :
				p.type <= TP_PATH_PXB ? "pcie" : "cpu";
			see(l, word, 0, p.why.text, "%s to %s", x->name, y->name);
		}
	}
	return ncclSuccess;
}

/* Each GPU and the port that it uses on channel 0. */
static ncclResult_t each_own_net(struct look *l, ncclResult_t (*one)(struct look *l, const struct tp_topo_node *gpu, const struct tp_topo_node *net))
{
	for (int32_t g = 0; g < l->topo->count[TP_TOPO_GPU]; g++) {
		const struct tp_topo_node *gpu = tp_topo_node_of(l->topo, TP_TOPO_GPU, g);
		int32_t net = tp_topo_local_net(l->topo, gpu->index, 0);
		TP_TRY(one(l, gpu, net >= 0 ? &l->topo->nodes[net] : NULL));
	}
	return ncclSuccess;
}

/* What a communicator would choose. */
static ncclResult_t see_net(struct look *l, const struct tp_topo_node *gpu, const struct tp_topo_node *net)
{
	if (!net) see(l, "none", 0, "no NIC is there", "%s", gpu->name);
	else see(l, net->net.fabric == TP_FABRIC_IB || net->net.fabric == TP_FABRIC_ROCE || net->net.fabric == TP_FABRIC_UNKNOWN ? "IB" : "Socket", 0, NULL, "%s, the NIC of %s",
		net->name, gpu->name);
	return ncclSuccess;
}

static ncclResult_t see_nic(struct look *l, const struct tp_topo_node *gpu, const struct tp_topo_node *net)
{
	static const char *const words[] = { "unknown", "ib", "roce", "ethernet", "efa" };
	if (net) see(l, words[net->net.fabric], 0, NULL, "%s, the NIC of %s", net->name, gpu->name);
	else see(l, "none", 0, "no NIC is there", "the NIC of %s", gpu->name);
	return ncclSuccess;
}

static ncclResult_t see_gdr(struct look *l, const struct tp_topo_node *gpu, const struct tp_topo_node *net)
{
	struct tp_topo_gdr gdr;
	if (!net) {
		see(l, "off", 0, "no NIC is there", "%s", gpu->name);
		return ncclSuccess;
	}
	TP_TRY(tp_topo_decide_gdr(l->topo, l->policy, gpu->index, net->index, false, &gdr));
	see(l, gdr.mode != TP_GDR_OFF ? "on" : "off", 0, gdr.why.text, "%s with %s", gpu->name, net->name);
	return ncclSuccess;
}

static ncclResult_t see_near(struct look *l, const struct tp_topo_node *gpu, const struct tp_topo_node *net)
{
	if (net) see(l, tp_topo_path_name(tp_topo_wire_path(l->topo, gpu->index, net->index)->type), 0, NULL, "%s to its NIC %s", gpu->name, net->name);
	else see(l, "DIS", 0, "no NIC is there", "%s", gpu->name);
	return ncclSuccess;
}

static ncclResult_t look_net(struct look *l) { return each_own_net(l, see_net); }
static ncclResult_t look_nic(struct look *l) { return each_own_net(l, see_nic); }
static ncclResult_t look_gdr(struct look *l) { return each_own_net(l, see_gdr); }
static ncclResult_t look_near(struct look *l) { return each_own_net(l, see_near); }

static ncclResult_t look_rate(struct look *l)
{
	for (int32_t n = 0; n < l->topo->count[TP_TOPO_NET]; n++) {
		const struct tp_topo_node *net = tp_topo_node_of(l->topo, TP_TOPO_NET, n);
		see(l, NULL, net->net.bw * 8, NULL, "%s", net->name);
	}
	return ncclSuccess;
}

static ncclResult_t look_lanes(struct look *l, enum tp_topo_kind kind)
{
	for (int32_t i = 0; i < l->topo->count[kind]; i++) {
		const struct tp_topo_node *node = tp_topo_node_of(l->topo, kind, i);
		if (node->pci.width) see(l, NULL, node->pci.width, NULL, "%s (%s)", node->name, node->pci.bus_id);
	}
	return ncclSuccess;
}

static ncclResult_t look_speed(struct look *l, enum tp_topo_kind kind)
{
	for (int32_t i = 0; i < l->topo->count[kind]; i++) {
		const struct tp_topo_node *node = tp_topo_node_of(l->topo, kind, i);
		if (node->pci.speed > 0) see(l, NULL, node->pci.speed, NULL, "%s (%s)", node->name, node->pci.bus_id);
	}
	return ncclSuccess;
}

static ncclResult_t look_gpu_lanes(struct look *l) { return look_lanes(l, TP_TOPO_GPU); }
static ncclResult_t look_nic_lanes(struct look *l) { return look_lanes(l, TP_TOPO_NIC); }
static ncclResult_t look_gpu_speed(struct look *l) { return look_speed(l, TP_TOPO_GPU); }
static ncclResult_t look_nic_speed(struct look *l) { return look_speed(l, TP_TOPO_NIC); }

static ncclResult_t look_acs(struct look *l)
{
	for (int32_t i = 0; i < l->topo->count[TP_TOPO_PCI]; i++) {
		const struct tp_topo_node *bridge = tp_topo_node_of(l->topo, TP_TOPO_PCI, i);
		see(l, bridge->pci.acs == 1 ? "on" : bridge->pci.acs == 0 ? "off" : "unknown", 0, bridge->pci.acs < 0 ? "only root can read it" : NULL, "%s", bridge->name);
	}
	return ncclSuccess;
}

static ncclResult_t look_faults(struct look *l)
{
	struct tp_topo_warning *list;
	int count;
	TP_TRY(tp_topo_find_faults(l->topo, l->policy, &list, &count));
	see(l, NULL, count, count ? list[0].text : NULL, "the machine");
	free(list);
	return ncclSuccess;
}

static ncclResult_t look_rings(struct look *l)
{
	struct tp_channels *rings;
	struct tp_topo_policy policy = *l->policy;
	if (l->topo->count[TP_TOPO_GPU] < 2) return ncclSuccess;
	policy.net_within = TP_OFF;             /* what communicators can do, whoever looks */
	TP_TRY(tp_channels_search(l->topo, &policy, TP_PATTERN_RING, &rings));
	see(l, NULL, rings->nchannels * TP_MIN(rings->bw_intra, rings->bw_inter), rings->nfindings ? rings->findings[0].text : NULL, "all rings together");
	tp_channels_free(rings);
	return ncclSuccess;
}

static const struct tp_expect_key keys[] = {
	{ "gpus", TP_EXPECT_COUNT, NULL, "GPUs of the machine" },
	{ "nics", TP_EXPECT_LEAST, NULL, "network ports of the machine" },
	{ "net", TP_EXPECT_TEXT, "IB|Socket|none", "the network that a communicator of these GPUs would use" },
	{ "nic", TP_EXPECT_WORD, "ib|roce|efa|ethernet|unknown|none", "what each GPU's own NIC is" },
	{ "gdr", TP_EXPECT_WORD, "on|off", "GPUDirect RDMA between each GPU and its own NIC" },
	{ "near", TP_EXPECT_WORD, "PIX|PXB|P2C|C2C|PHB|SYS|DIS", "where each GPU meets its own NIC" },
	{ "p2p", TP_EXPECT_WORD, "nvlink|relay|c2c|pcie|cpu|none", "direct access between any two GPUs" },
	{ "nvlinks", TP_EXPECT_LEAST, NULL, "NVLinks of each GPU" },
	{ "rings", TP_EXPECT_LEAST, NULL, "GB/s that the rings carry together" },
	{ "nic.gbps", TP_EXPECT_LEAST, NULL, "Gb/s of each port" },
	{ "nic.lanes", TP_EXPECT_LEAST, NULL, "PCIe lanes of each NIC" },
	{ "nic.gts", TP_EXPECT_LEAST, NULL, "PCIe speed of each NIC, GT/s" },
	{ "gpu.lanes", TP_EXPECT_LEAST, NULL, "PCIe lanes of each GPU" },
	{ "gpu.gts", TP_EXPECT_LEAST, NULL, "PCIe speed of each GPU, GT/s" },
	{ "acs", TP_EXPECT_WORD, "on|off|unknown", "ACS at each PCIe switch" },
	{ "faults", TP_EXPECT_COUNT, NULL, "what is worse than it could be" },
};
static ncclResult_t (*const looks[])(struct look *) = {
	look_gpus, look_nics, look_net, look_nic, look_gdr, look_near, look_p2p, look_nvlinks,
	look_rings, look_rate, look_nic_lanes, look_nic_speed, look_gpu_lanes, look_gpu_speed, look_acs, look_faults,
};
_Static_assert(TP_ARRAY_LEN(looks) == TP_ARRAY_LEN(keys), "each key has its look");

const struct tp_expect_key *tp_topo_expect_keys(size_t *count)
{
	*count = TP_ARRAY_LEN(keys);
	return keys;
}

const char *tp_topo_expect_key(int index, const char **words, const char **doc)
{
	if (index < 0 || index >= (int)TP_ARRAY_LEN(keys)) return NULL;
	if (words) *words = keys[index].words;
	if (doc) *doc = keys[index].doc;
	return keys[index].name;
}

/* ---- Writing ---- */

struct summary { char words[128]; double least; bool any; };

static void sum_up(struct look *look, const struct observation *o)
{
	struct summary *s = look->arg;
	if (o->word) {
		size_t used = strlen(s->words), bytes = strlen(o->word);
		for (const char *p = s->words; (p = strstr(p, o->word)); p += bytes)
			if ((p == s->words || p[-1] == '|') && (p[bytes] == '|' || !p[bytes])) return;
		if (used + bytes + 2 < sizeof(s->words)) sprintf(s->words + used, "%s%s", used ? "|" : "", o->word);
	} else if (!s->any || o->number < s->least) {
		s->least = o->number;
	}
	s->any = true;
}

ncclResult_t tp_topo_expect_write(const struct tp_topo *topo, const struct tp_topo_policy *policy, FILE *out)
{
	for (size_t k = 0; k < TP_ARRAY_LEN(keys); k++) {
		struct summary s = { .any = false };
		struct look look = { .topo = topo, .policy = policy, .see = sum_up, .arg = &s };
		TP_TRY(looks[k](&look));
		/* What can't be seen today may show tomorrow, to another user. */
		if (!s.any || strcmp(s.words, "unknown") == 0) continue;
		if (keys[k].unit <= TP_EXPECT_WORD) fprintf(out, "%s=%s", keys[k].name, s.words);
		else fprintf(out, "%s%s%.6g", keys[k].name, keys[k].unit == TP_EXPECT_LEAST ? ">=" : "=", s.least);
		fprintf(out, "%*s# %s\n", 4, "", keys[k].doc);
	}
	return ncclSuccess;
}

/* ---- Checking ---- */

struct wanted {
	struct tp_expect_item item;
	int seen, unmet;
	char first[480];
};

static void compare(struct look *look, const struct observation *o)
{
	struct wanted *w = look->arg;
	char found[32];
	bool met = o->word ? tp_expect_one_of(w->item.value, w->item.value_bytes, o->word) : tp_expect_holds(&w->item, o->number);
	w->seen++;
	if (met || w->unmet++) return;
	if (o->word) snprintf(found, sizeof(found), "%s", o->word);
	else snprintf(found, sizeof(found), "%.6g", o->number);
	snprintf(w->first, sizeof(w->first), "expected %.*s, found %s at %s%s%s", w->item.text_bytes, w->item.text, found, o->subject, o->why ? ": " : "", o->why ? o->why : "");
}

static ncclResult_t check_item(const struct tp_topo *topo, const struct tp_topo_policy *policy, struct wanted *w, struct tp_topo_unmet **list, int *count)
{
	struct look look = { .topo = topo, .policy = policy, .see = compare, .arg = w };
	TP_TRY(looks[w->item.key - keys](&look));
	if (w->seen && !w->unmet) return ncclSuccess;
	struct tp_topo_unmet *more = realloc(*list, (size_t)(*count + 1) * sizeof(**list));
	if (!more) return TP_FAIL(ncclSystemError, "no memory for %d expectations", *count + 1);
	*list = more;
	struct tp_topo_unmet *u = &more[(*count)++];
	if (!w->seen)
		snprintf(u->text, sizeof(u->text), "expected %.*s, found nothing there to look at: %s", w->item.text_bytes, w->item.text, w->item.key->doc);
	else if (w->unmet > 1) snprintf(u->text, sizeof(u->text), "%.440s (and %d more of %d)", w->first, w->unmet - 1, w->seen);
	else snprintf(u->text, sizeof(u->text), "%s", w->first);
	return ncclSuccess;
}

ncclResult_t tp_topo_expect_check_but(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *text, const char *name, const char *but,
	struct tp_topo_unmet **out, int *count)
{
	struct tp_topo_unmet *list = NULL;
	int unmet = 0;
	ncclResult_t result;
	for (;;) {
		struct wanted w = { .seen = 0 };
		result = tp_expect_next(&text, name, keys, TP_ARRAY_LEN(keys), &w.item);
		if (result != ncclSuccess || !w.item.key) break;
		if (tp_expect_is_own(w.item.key) || tp_expect_one_of(but, strlen(but), w.item.key->name)) continue;
		result = check_item(topo, policy, &w, &list, &unmet);
		if (result != ncclSuccess) break;
	}
	if (result != ncclSuccess) {
		free(list);
		return result;
	}
	*out = list;
	*count = unmet;
	return ncclSuccess;
}

ncclResult_t tp_topo_expect_check(const struct tp_topo *topo, const struct tp_topo_policy *policy, const char *text, const char *name,
	struct tp_topo_unmet **out, int *count)
{
	return tp_topo_expect_check_but(topo, policy, text, name, "", out, count);
}
