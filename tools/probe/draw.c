/* A sweep as a picture: size against time above, against bandwidth below, both axes by powers of ten; the fitted line dashed, S* marked.
 * One SVG file that needs nothing from elsewhere. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "probe/sweep.h"

enum { WIDTH = 760, HEIGHT = 700, LEFT = 80, RIGHT = 20, PLOT = 270 };

struct axis { double low, high; };          /* powers of ten */
struct plot { int top; struct axis x, y; const char *title, *unit; FILE *out; };

static void widen(struct axis *a, double value)
{
	double low = floor(log10(value)), high = ceil(log10(value));
	if (low < a->low) a->low = low;
	if (high > a->high) a->high = high;
	if (a->high <= a->low) a->high = a->low + 1;
}

static double at_x(const struct plot *p, double value) { return LEFT + (log10(value) - p->x.low) / (p->x.high - p->x.low) * (WIDTH - LEFT - RIGHT); }
static double at_y(const struct plot *p, double value)
{
	double y = p->top + PLOT - (log10(value) - p->y.low) / (p->y.high - p->y.low) * PLOT;
	return y < p->top ? p->top : y > p->top + PLOT ? p->top + PLOT : y;
}

static void power_text(double power, char text[32])
{
	static const char *const units[] = { "", "K", "M", "G", "T" };
	int unit = power > 0 ? (int)(power / 3) : 0;
	if (unit > 4) unit = 4;
	snprintf(text, 32, "%g%s", pow(10, power - 3 * unit), units[unit]);
}

static void draw_axes(const struct plot *p)
{
	char text[32];
	fprintf(p->out, "<rect class=\"frame\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>\n", LEFT, p->top, WIDTH - LEFT - RIGHT, PLOT);
	for (double e = p->x.low; e <= p->x.high; e++) {
		double x = at_x(p, pow(10, e));
		power_text(e, text);
		fprintf(p->out, "<line class=\"grid\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", x, p->top, x,
			p->top + PLOT, x, p->top + PLOT + 16, text);
	}
	for (double e = p->y.low; e <= p->y.high; e++) {
		double y = at_y(p, pow(10, e));
		fprintf(p->out, "<line class=\"grid\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT, y,
			WIDTH - RIGHT, y, LEFT - 6, y + 4, pow(10, e));
	}
	fprintf(p->out, "<text x=\"%d\" y=\"%d\" class=\"title\">%s</text>\n", LEFT, p->top - 8, p->title);
}

static void draw_curve(const struct plot *p, const struct probe_sweep *s, const char *class, double (*value)(const struct probe_sweep *, int))
{
	fprintf(p->out, "<polyline class=\"%s\" points=\"", class);
	for (int i = 0; i < s->count; i++)
		if (value(s, i) > 0) fprintf(p->out, "%s%.1f,%.1f", i ? " " : "", at_x(p, (double)s->points[i].bytes), at_y(p, value(s, i)));
	fprintf(p->out, "\"/>\n");
}

static double latency(const struct probe_sweep *s, int i) { return s->points[i].latency_us; }
static double bandwidth(const struct probe_sweep *s, int i) { return s->points[i].gbs; }
static double fitted(const struct probe_sweep *s, int i) { return s->fit.alpha_us + (double)s->points[i].bytes / s->fit.beta_gbs / 1000; }
static double fitted_gbs(const struct probe_sweep *s, int i) { return (double)s->points[i].bytes / fitted(s, i) / 1000; }

static void draw_text(FILE *out, const char *text)
{
	for (; *text; text++) {
		if (*text == '<') fputs("&lt;", out);
		else if (*text == '&') fputs("&amp;", out);
		else fputc(*text, out);
	}
}

int probe_draw_can(const char *path)
{
	struct stat there;
	/* What is there isn't opened: whoever reads a pipe would see its end. */
	if (stat(path, &there) == 0) {
		errno = S_ISDIR(there.st_mode) ? EISDIR : 0;
		return !errno && access(path, W_OK) == 0 ? 0 : probe_fail("%s can't be written: %s", path, strerror(errno));
	}
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	/* A link to what isn't there yet. */
	if (fd < 0 && errno == EEXIST) return 0;
	if (fd < 0) return probe_fail("%s can't be written: %s", path, strerror(errno));
	close(fd);
	unlink(path);
	return 0;
}

int probe_draw(const struct probe_sweep *s, const char *path)
{
	char a[32], b[32], c[32];
	FILE *out = fopen(path, "we");
	if (!out) return probe_fail("%s can't be written: %s", path, strerror(errno));
	struct plot times = { .top = 60, .x = { 99, -99 }, .y = { 99, -99 }, .title = "time of one message, us, by its bytes", .out = out }, rates = times;
	rates.top = times.top + PLOT + 60;
	rates.title = "bandwidth, GB/s, by the bytes of a message";
	for (int i = 0; i < s->count; i++) {
		widen(&times.x, (double)s->points[i].bytes);
		widen(&times.y, s->points[i].latency_us > 0 ? s->points[i].latency_us : 1);
		if (s->points[i].gbs > 0) widen(&rates.y, s->points[i].gbs);
	}
	if (rates.y.high < rates.y.low) rates.y = (struct axis){ 0, 1 };
	rates.x = times.x;
	fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n<style>.frame{fill:none;stroke:#888}"
		".grid{stroke:#ddd}.title{font-weight:bold}polyline{fill:none;stroke-width:2}.latency{stroke:#06c}.bandwidth{stroke:#080}.fit{stroke:#c60;stroke-dasharray:6 4}"
		".star{stroke:#c00;stroke-dasharray:2 3}</style>\n<rect x=\"0\" y=\"0\" width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", WIDTH, HEIGHT, WIDTH, HEIGHT);
	fprintf(out, "<text x=\"%d\" y=\"24\" class=\"title\" font-size=\"14\">", LEFT);
	draw_text(out, s->title);
	fprintf(out, "</text>\n");
	draw_axes(&times);
	draw_axes(&rates);
	draw_curve(&times, s, "latency", latency);
	draw_curve(&rates, s, "bandwidth", bandwidth);
	if (s->fitted) {
		draw_curve(&times, s, "fit", fitted);
		draw_curve(&rates, s, "fit", fitted_gbs);
		double x = s->fit.s_star > 0 ? at_x(&times, s->fit.s_star) : 0;
		if (x >= LEFT && x <= WIDTH - RIGHT) fprintf(out, "<line class=\"star\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>\n", x, times.top, x, rates.top + PLOT);
		fprintf(out, "<text x=\"%d\" y=\"%d\">alpha %s us, beta %s GB/s (dashed); S* = alpha x beta = %s KB (dotted)</text>\n", LEFT, HEIGHT - 12,
			probe_digits(s->fit.alpha_us, a), probe_digits(s->fit.beta_gbs, b), probe_digits(s->fit.s_star / 1000, c));
	}
	fprintf(out, "</svg>\n");
	bool bad = ferror(out);
	if (fclose(out) || bad) return probe_fail("%s can't be written: %s", path, strerror(errno));
	return 0;
}
