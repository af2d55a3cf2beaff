/* Who holds port 4791: found in /proc, so that the error names the holder and the cure. */
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "verbs/port.h"

struct holder { unsigned long inode; unsigned int uid; bool found; };

/* A line of /proc/net/udp or udp6: is it a socket on the port, at addr or at the wildcard? */
static bool line_matches(const char *line, const union tp_addr *addr, struct holder *out)
{
	char local[33];
	unsigned int port, uid;
	unsigned long inode;
	if (sscanf(line, " %*d: %32[0-9A-Fa-f]:%x %*s %*s %*s %*s %*s %u %*d %lu", local, &port, &uid, &inode) != 4 || port != TP_WIRE_UDP_PORT)
		return false;
	char mine[33] = "";
	const uint32_t *words = addr->sa.sa_family == AF_INET6 ? addr->v6.sin6_addr.s6_addr32 : &addr->v4.sin_addr.s_addr;
	for (int i = 0; i < (addr->sa.sa_family == AF_INET6 ? 4 : 1); i++)
		snprintf(mine + 8 * i, sizeof(mine) - 8 * (size_t)i, "%08X", words[i]);
	bool any = strspn(local, "0") == strlen(local);
	if (!any && strcasecmp(local, mine))
		return false;
	*out = (struct holder){ inode, uid, true };
	return true;
}

static struct holder find_holder(const union tp_addr *addr)
{
	const char *const files[] = { "/proc/self/net/udp", "/proc/self/net/udp6" };
	struct holder holder = { 0 };
	char line[512];
	for (size_t i = 0; i < TP_ARRAY_LEN(files) && !holder.found; i++) {
		FILE *file = fopen(files[i], "re");
		while (file && !holder.found && fgets(line, sizeof(line), file))
			line_matches(line, addr, &holder);
		if (file)
			fclose(file);
	}
	return holder;
}

/* Has the process an open descriptor of that socket? Others' can't be read without rights. */
static bool has_socket(const char *pid, unsigned long inode)
{
	char path[64], link[64], wanted[64];
	snprintf(path, sizeof(path), "/proc/%.16s/fd", pid);
	snprintf(wanted, sizeof(wanted), "socket:[%lu]", inode);
	DIR *dir = opendir(path);
	bool found = false;
	for (struct dirent *e = dir ? readdir(dir) : NULL; e && !found; e = readdir(dir)) {
		ssize_t n = readlinkat(dirfd(dir), e->d_name, link, sizeof(link) - 1);
		if (n > 0) {
			link[n] = 0;
			found = !strcmp(link, wanted);
		}
	}
	if (dir)
		closedir(dir);
	return found;
}

static bool name_process(unsigned long inode, char *text, size_t bytes)
{
	DIR *proc = opendir("/proc");
	bool found = false;
	for (struct dirent *e = proc ? readdir(proc) : NULL; e && !found; e = readdir(proc)) {
		char path[64], name[32] = "";
		if (!isdigit((unsigned char)e->d_name[0]) || !has_socket(e->d_name, inode))
			continue;
		snprintf(path, sizeof(path), "/proc/%.16s/comm", e->d_name);
		FILE *file = fopen(path, "re");
		if (file) {
			if (fgets(name, sizeof(name), file))
				name[strcspn(name, "\n")] = 0;
			fclose(file);
		}
		snprintf(text, bytes, "process %.16s (%s)", e->d_name, name);
		found = true;
	}
	if (proc)
		closedir(proc);
	return found;
}

void tp_endpoint_explain(const union tp_addr *addr, int error)
{
	char text[TP_ADDR_TEXT], who[128], user[64];
	if (error == EADDRNOTAVAIL) {
		TP_WARN("RoCE v2 can't use the address %s: no interface of this machine has it (any more)", tp_addr_format(addr, text));
		return;
	}
	if (error != EADDRINUSE) {
		TP_WARN("RoCE v2 can't use UDP port %d at %s: %s", TP_WIRE_UDP_PORT, tp_addr_format(addr, text), strerror(error));
		return;
	}
	struct holder holder = find_holder(addr);
	struct passwd entry, *found = NULL;
	char buffer[1024];
	if (holder.found && getpwuid_r(holder.uid, &entry, buffer, sizeof(buffer), &found) == 0 && found)
		snprintf(user, sizeof(user), "user %s", found->pw_name);
	else
		snprintf(user, sizeof(user), "user %u", holder.uid);
	if (holder.found && holder.inode && name_process(holder.inode, who, sizeof(who)))
		TP_WARN("UDP port %d at %s is held by %s of %s: end it, or give the software card another address (TELPHER_VERBS_IFNAME)",
			TP_WIRE_UDP_PORT, tp_addr_format(addr, text), who, user);
	else if (holder.found && holder.inode)
		TP_WARN("UDP port %d at %s is held by a process of %s: only processes of one user share it; use another address (TELPHER_VERBS_IFNAME) or user",
			TP_WIRE_UDP_PORT, tp_addr_format(addr, text), user);
	else
		TP_WARN("UDP port %d at %s is held by the kernel: its RoCE (rxe, or a real card's) is there: use that, or remove it (rdma link delete), or another network namespace",
			TP_WIRE_UDP_PORT, tp_addr_format(addr, text));
}
