/* The line through measured times; see fit.h. */
#include "probe/fit.h"

bool probe_fit(int count, const double *bytes, const double *us, struct probe_fit *out)
{
	double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
	int used = 0;
	for (int i = 0; i < count; i++) {
		if (!(us[i] > 0)) continue;
		double weight = 1 / (us[i] * us[i]);
		w += weight;
		wx += weight * bytes[i];
		wy += weight * us[i];
		wxx += weight * bytes[i] * bytes[i];
		wxy += weight * bytes[i] * us[i];
		used++;
	}
	double spread = w * wxx - wx * wx;
	if (used < 2 || !(spread > 0)) return false;
	double slope = (w * wxy - wx * wy) / spread, alpha = (wy - slope * wx) / w;
	if (alpha < 0) {
		/* No message takes less than nothing: the line goes through the origin. */
		alpha = 0;
		slope = wxy / wxx;
	}
	if (!(slope > 0)) return false;
	/* GB/s are thousands of bytes a microsecond. */
	*out = (struct probe_fit){ .alpha_us = alpha, .beta_gbs = 1 / slope / 1000, .s_star = alpha / slope };
	return true;
}
