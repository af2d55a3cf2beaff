/* A libnvidia-ml.so.1 for tests: four devices, 0000:01:00.0 to 0000:04:00.0. The first two are joined by two NVLinks, the first and the
 * third by switches (18 and 12 links), the fourth hangs behind the host bridge and may not be read by the third. */
#include <stdio.h>
#include <string.h>

struct pci {
	char legacy[16];
	unsigned int domain, bus, device, device_id, subsystem_id;
	char bus_id[32];
};
int fakeNvmlQuestions(void);        /* about links, so far */
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out);
int nvmlDeviceGetNvLinkState(void *device, unsigned int link, int *active);
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, struct pci *out);
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, int *out);
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level);
int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status);

static char devices[5];
static int number_of(void *device) { return (int)((char *)device - devices); }

static int questions;
int fakeNvmlQuestions(void) { return questions; }
int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **out)
{
	unsigned int domain, bus, device;
	if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) != 3 || domain || device || bus < 1 || bus > 4) return 6;
	*out = &devices[bus];
	return 0;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned int link, int *active)
{
	static const unsigned int links[] = { 0, 18, 2, 12, 0 };
	questions++;
	*active = link < links[number_of(device)];
	return link < 18 ? 0 : 2;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned int link, int *out)
{
	questions++;
	*out = number_of(device) == 2 || (number_of(device) == 1 && link < 2) ? 0 : 2;
	return 0;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned int link, struct pci *out)
{
	questions++;
	(void)link;
	memset(out, 0, sizeof(*out));
	out->bus = number_of(device) == 1 ? 2 : 1;
	return 0;
}

int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level)
{
	*level = number_of(a) == 4 || number_of(b) == 4 ? 30 : 20;
	return 0;
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int what, int *status)
{
	(void)what;
	*status = number_of(a) + number_of(b) == 7 ? 2 : 0;
	return 0;
}
