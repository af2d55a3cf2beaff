/* Data-parallel training on handwritten digits: the data, the network, and (digits.c) the ranks. */
#ifndef DIGITS_H
#define DIGITS_H

#include <stddef.h>

enum { PIXELS = 64, HIDDEN = 48, CLASSES = 10 };

struct digit { float pixels[PIXELS]; int label; };     /* pixels in 0 … 1 */
struct digits { size_t count; struct digit *all; };

/* Reads the CSV: 64 pixels (0 to 16) and the label a line. 0, or -1 with a message on stderr. */
int digits_read(const char *path, struct digits *out);
/* Puts them in an order that is the same everywhere. */
void digits_shuffle(struct digits *digits, unsigned seed);

/* All parameters in one array, so that one all-reduce carries all gradients. */
enum {
	W1 = 0, B1 = W1 + PIXELS * HIDDEN, W2 = B1 + HIDDEN, B2 = W2 + HIDDEN * CLASSES, PARAMETERS = B2 + CLASSES
};
void network_init(float *parameters, unsigned seed);
/* Adds the gradient of one image's loss to gradient (NULL: don't) and returns the loss; *right is 1 where the guess is. */
float network_learn(const float *parameters, const struct digit *digit, float *gradient, int *right);

#endif
