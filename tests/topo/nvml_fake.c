/* A libnvidia-ml.so.1 for tests: two H100 (0000:1a:00.0 and 0000:3a:00.0) with 18 links each to switches, of which the second has lost 2;
 * a third, 0000:5a:00.0, with C2C and an NVLink domain; a V100 at 0000:6a:00.0 with two links to 0000:7a:00.0. The driver forbids the
 * first and the third to reach each other. */
#include <stdio.h>
#include <string.h>

struct pci { char legacy[16]; unsigned int domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
struct field { unsigned int field, scope; long long timestamp, latency; int type, result; union { double d; unsigned int u; long long ll; } value; };
struct fabric { unsigned char cluster[16]; int status; unsigned int clique, state; };

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out);
int nvmlDeviceGetIndex(void *device, unsigned int *out);
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor);
int nvmlDeviceGetNvLinkState(void *device, unsigned int link, int *active);
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, struct pci *out);
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, int *out);
int nvmlDeviceGetFieldValues(void *device, int count, struct field *values);
int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric *out);
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status);

enum { FIRST, SECOND, SUPER, OLD, COUNT };
static const struct { unsigned int bus; int major; unsigned int links; } machine[COUNT] = { { 0x1a, 9, 18 }, { 0x3a, 9, 16 }, { 0x5a, 10, 18 }, { 0x6a, 7, 2 } };
static char devices[COUNT];
static int number_of(void *device) { return (int)((char *)device - devices); }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out)
{
	unsigned int domain, bus, device;
	if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) != 3) return 2;
	for (int i = 0; i < COUNT; i++) {
		if (machine[i].bus != bus || domain || device) continue;
		*out = &devices[i];
		return 0;
	}
	return 6;
}

int nvmlDeviceGetIndex(void *device, unsigned int *out)
{
	*out = (unsigned int)number_of(device);
	return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
	*major = machine[number_of(device)].major;
	*minor = 0;
	return 0;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned int link, int *active)
{
	*active = link < machine[number_of(device)].links;
	return link < 18 ? 0 : 2;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, struct pci *out)
{
	(void)link;
	memset(out, 0, sizeof(*out));
	out->bus = 0x7a;
	return number_of(device) == OLD ? 0 : 3;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, int *out)
{
	(void)link;
	*out = number_of(device) == OLD ? 0 : 2;
	return 0;
}

int nvmlDeviceGetFieldValues(void *device, int count, struct field *values)
{
	for (int i = 0; i < count; i++) {
		values[i].result = number_of(device) == SUPER ? 0 : 3;
		values[i].value.u = values[i].field == 170 ? 5 : values[i].field == 171 ? 1 : 44712;
	}
	return 0;
}

int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric *out)
{
	memset(out, 0, sizeof(*out));
	out->state = 3;
	out->clique = 7;
	if (number_of(device) == SUPER) memset(out->cluster, 0xab, sizeof(out->cluster));
	return 0;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status)
{
	(void)what;
	*status = number_of(a) + number_of(b) == SUPER && a != b ? 3 : 0;
	return 0;
}
