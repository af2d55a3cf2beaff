/* `telpher verbs`: the software card. Runs programs on it (verbs_run.c) and shows what they would see of it. */
#include "tools.h"
#include "verbs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "verbs/card.h"
#include "verbs/path.h"

static int devices(int argc, char **argv)
{
	(void)argv;
	if (argc > 1)
		return tool_usage_error("verbs devices", "it takes no arguments");
	struct tp_device *all;
	int count = tp_card_devices(&all);
	printf("%-16s %-5s %-8s %-10s %-6s %-20s %-20s %-13s %s\n", "device", "port", "state", "rate", "MTU", "interfaces", "node GUID", "PCI", "NUMA");
	for (int d = 0; d < count; d++)
		for (int p = 0; p < all[d].nports; p++) {
			const struct tp_port *port = &all[d].ports[p];
			char rate[24], guid[24];
			uint8_t b[8];
			memcpy(b, &all[d].guid, sizeof(b));
			snprintf(rate, sizeof(rate), "%u Gb/s", port->rate_gbps);
			snprintf(guid, sizeof(guid), "%02x%02x:%02x%02x:%02x%02x:%02x%02x", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
			printf("%-16s %-5u %-8s %-10s %-6d %-20s %-20s %-13s %d\n", all[d].ibv.name, port->number,
				atomic_load_explicit(&port->state, memory_order_relaxed) == IBV_PORT_ACTIVE ? "ACTIVE" : "DOWN", rate, 128 << port->mtu,
				port->ifname, guid, all[d].pci, all[d].numa);
		}
	if (!count)
		printf("no devices (TELPHER_VERBS_DEVICES)\n");
	return 0;
}

static int print_gids(struct tp_port *port)
{
	int found = 0;
	struct tp_gid gid;
	for (uint32_t i = 0; i < (uint32_t)port->gid_table_len; i++) {
		if (!tp_port_gid(port, i, &gid))
			continue;
		char text[48], ipv4[20] = "";
		const uint8_t *raw = gid.gid.raw;
		int used = 0;
		for (int b = 0; b < 16; b += 2)
			used += snprintf(text + used, sizeof(text) - (size_t)used, "%s%02x%02x", b ? ":" : "", raw[b], raw[b + 1]);
		if (gid.addr.sa.sa_family == AF_INET)
			snprintf(ipv4, sizeof(ipv4), "%u.%u.%u.%u", raw[12], raw[13], raw[14], raw[15]);
		printf("%s\t%u\t%u\t%s\t%-15s\t%s\t%s\n", port->device->ibv.name, port->number, i, text, ipv4,
			gid.type == IBV_GID_TYPE_ROCE_V2 ? "v2" : "v1", gid.ifname);
		found++;
	}
	return found;
}

/* Of which device, if of one; false: said that there is none of that name. */
static bool read_device(const char *command, int argc, char **argv, const char **wanted)
{
	struct tp_device *all;
	int count = tp_card_devices(&all);
	*wanted = argc > 1 ? argv[1] : NULL;
	if (argc > 2)
		return tool_usage_error(command, "it takes the name of one device at most"), false;
	bool matched = !*wanted;
	for (int d = 0; d < count; d++)
		matched |= *wanted && !strcmp(*wanted, all[d].ibv.name);
	return matched || (tool_usage_error(command, "there is no device %s, see `telpher verbs devices`", *wanted), false);
}

/* show_gids' columns, so that what reads them reads these. */
static int gids(int argc, char **argv)
{
	struct tp_device *all;
	int count = tp_card_devices(&all), found = 0;
	const char *wanted;
	if (!read_device("verbs gids", argc, argv, &wanted))
		return TOOL_USAGE;
	printf("DEV\tPORT\tINDEX\tGID\t\t\t\t\tIPv4  \t\tVER\tDEV\n---\t----\t-----\t---\t\t\t\t\t------------  \t---\t---\n");
	for (int d = 0; d < count; d++) {
		if (wanted && strcmp(wanted, all[d].ibv.name))
			continue;
		for (int p = 0; p < all[d].nports; p++)
			found += print_gids(&all[d].ports[p]);
	}
	printf("n_gids_found=%d\n", found);
	return 0;
}

static int counters(int argc, char **argv)
{
	struct tp_device *all;
	int count = tp_card_devices(&all);
	const char *wanted;
	if (!read_device("verbs counters", argc, argv, &wanted))
		return TOOL_USAGE;
	for (int d = 0; d < count; d++) {
		if (wanted && strcmp(wanted, all[d].ibv.name))
			continue;
		for (int p = 0; p < all[d].nports; p++) {
			uint64_t sums[TP_CNT_COUNT];
			tp_counters_read(&all[d].ports[p], sums);
			for (int c = 0; c < TP_CNT_COUNT; c++)
				printf("%s\t%d\t%-28s\t%llu\n", all[d].ibv.name, p + 1, tp_counter_name((enum tp_counter)c), (unsigned long long)sums[c]);
		}
	}
	return 0;
}

static void print_pairs(int slot)
{
	struct tp_path_pair pairs[TP_PATH_SLOTS];
	int count = tp_path_ask(slot, pairs, TP_PATH_SLOTS);
	for (int i = 0; i < count; i++)
		printf("%d\t%d\t%d\t%s\t%llu\t%llu\t%llu\t%s\n", pairs[i].pid, pairs[i].peer_pid, pairs[i].qps, pairs[i].reason == TP_PATH_TAKEN ? "path" : "wire",
			(unsigned long long)pairs[i].direct, (unsigned long long)pairs[i].mapped, (unsigned long long)pairs[i].ring,
			tp_path_reason_text((enum tp_path_reason)pairs[i].reason));
}

/* Each process of this user that uses the card has a socket by whose name it is found, and asked. */
static int pairs(int argc, char **argv)
{
	(void)argv;
	if (argc > 1)
		return tool_usage_error("verbs pairs", "it takes no arguments");
	FILE *file = fopen("/proc/net/unix", "re");
	char line[512], name[64];
	bool seen[TP_PATH_SLOTS] = { false };
	snprintf(name, sizeof(name), "@telpher-verbs-path-%u-", (unsigned)geteuid());
	printf("PID\tPEER\tQPS\tWAY\tDIRECT\tMAPPED\tRING\tWHY\n");
	while (file && fgets(line, sizeof(line), file)) {
		const char *at = strstr(line, name);
		int slot = at ? atoi(at + strlen(name)) : -1;
		if (slot < 0 || slot >= TP_PATH_SLOTS || seen[slot])
			continue;
		seen[slot] = true;
		print_pairs(slot);
	}
	if (file)
		fclose(file);
	return 0;
}

static int help(FILE *to)
{
	fprintf(to, "usage: telpher verbs run [--hide-real] [--shared-alloc] PROGRAM [ARGUMENTS]\n"
		"       telpher verbs devices | gids [DEVICE] | counters [DEVICE] | pairs\n"
		"       telpher verbs fault [-p PID]... [--all] [FAULTS|none]\n"
		"       telpher verbs capture [-p PID]... [--all] FILE.pcapng [SECONDS]\n\n"
		"  run       run a program on the software card: it sees RDMA devices that need no hardware (--help: its options)\n"
		"  devices   the devices and ports that it would see\n"
		"  gids      their GIDs, in show_gids' columns\n"
		"  counters  their counters, over all processes of this user\n"
		"  pairs     which processes of this machine are connected, the way that is taken between them, and why\n"
		"  fault     have a running process meet faults: lost packets, dead ports, … (--help lists them)\n"
		"  capture   write a running process's packets into a file for Wireshark\n\n"
		"For example, two processes of this machine:\n\n"
		"    telpher verbs run ib_write_bw &\n"
		"    telpher verbs run ib_write_bw localhost\n\n"
		"`telpher env` lists the TELPHER_VERBS_* variables that say what the card looks like; telpher-env(7) explains them.\n");
	return to == stdout ? 0 : TOOL_USAGE;
}

static bool wants_help(const char *word) { return !strcmp(word, "--help") || !strcmp(word, "-h"); }

int tool_verbs(int argc, char **argv)
{
	static const struct { const char *name; int (*main)(int argc, char **argv); } commands[] = {
		{ "run", tool_verbs_run }, { "fault", tool_verbs_fault }, { "capture", tool_verbs_capture }, { "devices", devices }, { "gids", gids },
		{ "counters", counters }, { "pairs", pairs },
	};
	enum { WITH_OWN_HELP = 3 };
	if (argc < 2)
		return help(stderr);
	if (wants_help(argv[1]) || !strcmp(argv[1], "help"))
		return help(stdout);
	/* What looks at the card here hides nothing from anybody. */
	if (strcmp(argv[1], "run"))
		setenv("TELPHER_VERBS_HIDE_REAL", "1", 1);
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		if (!strcmp(argv[1], commands[i].name))
			return i >= WITH_OWN_HELP && argc > 2 && wants_help(argv[2]) ? help(stdout) : commands[i].main(argc - 1, argv + 1);
	return tool_usage_error("verbs", "there is no command '%s'", argv[1]);
}
