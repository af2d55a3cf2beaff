/* How far apart two devices may be that reach each other's memory, as users say it (NCCL_P2P_LEVEL, NCCL_NET_GDR_LEVEL). */
#include <stdlib.h>
#include <strings.h>

#include "gpu/gpu.h"

int tp_gpu_level_parse(const char *text)
{
	static const char *const names[TP_GPU_LEVELS] = { "LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS" };
	/* Before there were names: LOC, PIX, PXB, PHB, SYS, and whatever is larger. */
	static const int old[] = { 0, 4, 5, 8, 9 };
	char *end;
	for (int i = 0; i < TP_GPU_LEVELS; i++)
		if (strcasecmp(text, names[i]) == 0) return i;
	long number = strtol(text, &end, 10);
	if (end == text || *end || number < 0) return -1;
	return old[TP_MIN(number, (long)TP_ARRAY_LEN(old) - 1)];
}

enum tp_gpu_distance tp_gpu_level_distance(int level)
{
	static const enum tp_gpu_distance farthest[TP_GPU_LEVELS] = { TP_GPU_LOC, TP_GPU_NVL, TP_GPU_NVL, TP_GPU_NVL, TP_GPU_PIX, TP_GPU_PXB, TP_GPU_PXB, TP_GPU_PXB,
		TP_GPU_PHB, TP_GPU_SYS };
	return level >= 0 && level < TP_GPU_LEVELS ? farthest[level] : TP_GPU_UNKNOWN;
}
