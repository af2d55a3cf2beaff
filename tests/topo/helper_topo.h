/* Small machines as text. */
#ifndef TESTS_TOPO_HELPER_TOPO_H
#define TESTS_TOPO_HELPER_TOPO_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "topo/topo.h"

/* Fails the test where the text isn't taken. */
struct tp_topo_doc *helper_doc(const char *text);
/* The graph with its paths, under the default policy or the one given. */
struct tp_topo *helper_topo(const char *text, const struct tp_topo_policy *policy);
int32_t helper_node(const struct tp_topo *topo, const char *name);
/* The message with which it is refused; fails the test where it is taken. */
const char *helper_refusal(const char *text);

#define HELPER_CPU(numa) "<cpu numaid=\"" numa "\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"143\" affinity=\"ff\">"
#define HELPER_X16 "link_speed=\"32.0 GT/s PCIe\" link_width=\"16\""
#define HELPER_BRIDGE(bus, more) "<pci busid=\"" bus "\" class=\"0x060400\" " HELPER_X16 more ">"
#define HELPER_GPU(bus, dev, inside) "<pci busid=\"" bus "\" class=\"0x030200\" " HELPER_X16 "><gpu dev=\"" dev "\" sm=\"90\" rank=\"" dev \
	"\" gdr=\"1\">" inside "</gpu></pci>"
#define HELPER_NIC(bus, dev) "<pci busid=\"" bus "\" class=\"0x020700\" " HELPER_X16 "><nic><net name=\"mlx5_" dev "\" dev=\"" dev \
	"\" speed=\"400000\" port=\"1\" gdr=\"1\"/></nic></pci>"
#define HELPER_NV18 "<nvlink target=\"fffffff:ffff:ff\" count=\"18\" tclass=\"0x068000\"/>"
/* Two GPUs and two NICs under two switches of one CPU, no NVLink. */
#define HELPER_PAIR "<system version=\"1\">" HELPER_CPU("0") HELPER_BRIDGE("0000:10:00.0", "") HELPER_GPU("0000:11:00.0", "0", "") \
	HELPER_NIC("0000:12:00.0", "0") "</pci>" HELPER_BRIDGE("0000:20:00.0", "") HELPER_GPU("0000:21:00.0", "1", "") \
	HELPER_NIC("0000:22:00.0", "1") "</pci></cpu></system>"

#endif
