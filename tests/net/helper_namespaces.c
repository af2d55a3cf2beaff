#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "net/helper_namespaces.h"

bool shell(const char *format, ...)
{
	char line[512];
	va_list args;

	va_start(args, format);
	vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	return system(line) == 0;
}

bool namespaces_enter_own(int network)
{
	if (getuid() != 0 || unshare(CLONE_NEWNET) != 0 || !shell("ip link set lo up 2>/dev/null")) return false;
	for (int i = 0; i < 2; i++)
		if (!shell("ip link add tp%d type veth peer name tq%d && ip addr add 10.%d.%d.1/24 dev tp%d && ip link set tp%d up && ip link set tq%d up", i, i, network, i, i, i, i)) return false;
	for (int i = 0; i < 2; i++)
		while (!shell("ip link show tp%d | grep -q 'state UP'", i)) usleep(20000);
	return true;
}

bool namespaces_join(const pid_t sides[2], const char *name, const char *v4, const char *v6)
{
	if (!shell("ip link add %s netns %d type veth peer name %s netns %d 2>/dev/null", name, (int)sides[0], name, (int)sides[1])) return false;
	for (int i = 0; i < 2; i++) {
		if (!shell("nsenter -t %d -n sh -c 'ip link set lo up && ip addr add %s%d/24 dev %s && ip link set %s up' 2>/dev/null", (int)sides[i], v4, i + 1, name, name)) return false;
		if (v6) shell("nsenter -t %d -n ip addr add %s%d/64 dev %s nodad 2>/dev/null", (int)sides[i], v6, i + 1, name);
	}
	return true;
}

bool namespaces_await(const pid_t sides[2], const char *name)
{
	for (int tries = 0; tries < 3000; tries++, usleep(20000))
		if (shell("nsenter -t %d -n ip link show %s | grep -q 'state UP' && nsenter -t %d -n ip link show %s | grep -q 'state UP'", (int)sides[0], name, (int)sides[1], name)) return true;
	return false;
}
