/* 64 inputs, one hidden layer (tanh), 10 outputs, cross-entropy. */
#include "digits.h"

#include <math.h>
#include <string.h>

void network_init(float *parameters, unsigned seed)
{
	memset(parameters, 0, PARAMETERS * sizeof(float));
	for (int i = 0; i < PARAMETERS; i++) {
		if ((i >= B1 && i < W2) || i >= B2) continue;
		seed = seed * 1664525u + 1013904223u;
		float uniform = (float)(seed >> 8) / (float)(1 << 24) * 2 - 1;
		parameters[i] = uniform * sqrtf(3.0f / (i < B1 ? PIXELS : HIDDEN));
	}
}

static int softmax(float *values)
{
	int best = 0;
	float sum = 0;
	for (int c = 1; c < CLASSES; c++)
		if (values[c] > values[best]) best = c;
	float top = values[best];
	for (int c = 0; c < CLASSES; c++) sum += values[c] = expf(values[c] - top);
	for (int c = 0; c < CLASSES; c++) values[c] /= sum;
	return best;
}

float network_learn(const float *p, const struct digit *digit, float *gradient, int *right)
{
	float hidden[HIDDEN], output[CLASSES];
	for (int h = 0; h < HIDDEN; h++) {
		float sum = p[B1 + h];
		for (int i = 0; i < PIXELS; i++) sum += p[W1 + h * PIXELS + i] * digit->pixels[i];
		hidden[h] = tanhf(sum);
	}
	for (int c = 0; c < CLASSES; c++) {
		output[c] = p[B2 + c];
		for (int h = 0; h < HIDDEN; h++) output[c] += p[W2 + c * HIDDEN + h] * hidden[h];
	}
	*right = softmax(output) == digit->label;
	float loss = -logf(fmaxf(output[digit->label], 1e-30f));
	if (!gradient) return loss;

	float back[HIDDEN] = { 0 };
	for (int c = 0; c < CLASSES; c++) {
		float d = output[c] - (c == digit->label);
		gradient[B2 + c] += d;
		for (int h = 0; h < HIDDEN; h++) {
			gradient[W2 + c * HIDDEN + h] += d * hidden[h];
			back[h] += d * p[W2 + c * HIDDEN + h];
		}
	}
	for (int h = 0; h < HIDDEN; h++) {
		float d = back[h] * (1 - hidden[h] * hidden[h]);
		gradient[B1 + h] += d;
		for (int i = 0; i < PIXELS; i++) gradient[W1 + h * PIXELS + i] += d * digit->pixels[i];
	}
	return loss;
}
