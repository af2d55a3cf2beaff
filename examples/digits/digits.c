/* Each rank works on its share of every batch; ncclAllReduce adds the gradients up; all take the same step. Start it alone,
 * or with `telpher run -n 4 -- digits [CSV]`: the losses are the same within rounding. */
#include "digits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "nccl.h"
#include "telpher.h"

enum { EPOCHS = 30, BATCH = 48, SEED = 1998 };
static const float rate = 0.35f, momentum = 0.9f;

/* What one all-reduce carries: the gradients, then the loss and the number of right guesses. */
struct sums { float gradient[PARAMETERS], loss, right; };
enum { SUMS = sizeof(struct sums) / sizeof(float) };

#define CALL(call) do { \
	ncclResult_t result_ = (call); \
	if (result_ != ncclSuccess) { \
		fprintf(stderr, "digits: %s: %s: %s\n", #call, ncclGetErrorString(result_), ncclGetLastError(NULL)); \
		exit(1); \
	} \
} while (0)

static void learn_batch(const struct digits *data, size_t from, size_t to, const telpher_rank_t *me, const float *parameters, struct sums *sums)
{
	memset(sums, 0, sizeof(*sums));
	for (size_t i = from + (size_t)me->rank; i < to; i += (size_t)me->nranks) {
		int right;
		sums->loss += network_learn(parameters, &data->all[i], sums->gradient, &right);
		sums->right += (float)right;
	}
}

static float held_out_accuracy(const struct digits *data, size_t from, const float *parameters)
{
	size_t right = 0;
	for (size_t i = from; i < data->count; i++) {
		int guess;
		network_learn(parameters, &data->all[i], NULL, &guess);
		right += (size_t)guess;
	}
	return (float)right / (float)(data->count - from);
}

static float train(const struct digits *data, size_t count, const telpher_rank_t *me, ncclComm_t comm, float *parameters)
{
	static float velocity[PARAMETERS];
	static struct sums sums;
	float loss = 0;
	for (int epoch = 1; epoch <= EPOCHS; epoch++) {
		float right = 0;
		loss = 0;
		for (size_t from = 0; from < count; from += BATCH) {
			size_t to = from + BATCH < count ? from + BATCH : count;
			learn_batch(data, from, to, me, parameters, &sums);
			CALL(ncclAllReduce(&sums, &sums, SUMS, ncclFloat, ncclSum, comm, NULL));
			float step = rate / (float)(to - from);
			for (int p = 0; p < PARAMETERS; p++) {
				velocity[p] = momentum * velocity[p] - step * (1 - momentum) * sums.gradient[p];
				parameters[p] += velocity[p];
			}
			loss += sums.loss;
			right += sums.right;
		}
		loss /= (float)count;
		if (me->rank == 0 && (epoch == 1 || epoch % 5 == 0))
			printf("epoch %2d  loss %.5f  right %5.2f %%\n", epoch, loss, 100 * right / (float)count);
	}
	return loss;
}

int main(int argc, char **argv)
{
	telpher_rank_t me = { .rank = 0, .nranks = 1 };
	struct digits data;
	ncclComm_t comm;
	if (argc > 2) { fprintf(stderr, "usage: digits [CSV]\n"); return 2; }
	if (digits_read(argc > 1 ? argv[1] : DIGITS_CSV, &data)) return 1;
	setenv("TELPHER_DEVICE", "host", 0);        /* its buffers are host memory, on machines with GPUs too */
	CALL(telpher_comm_init_from_environment(&comm, NULL));
	CALL(ncclCommUserRank(comm, &me.rank));
	CALL(ncclCommCount(comm, &me.nranks));

	digits_shuffle(&data, SEED);
	size_t training = data.count * 4 / 5;
	static float parameters[PARAMETERS];
	network_init(parameters, SEED);
	if (me.rank == 0)
		printf("%d rank(s), %zu images to learn from, %zu held out, %d parameters\n", me.nranks, training, data.count - training, PARAMETERS);
	train(&data, training, &me, comm, parameters);
	float accuracy = held_out_accuracy(&data, training, parameters);
	if (me.rank == 0) printf("held-out images recognised: %.2f %%\n", 100 * accuracy);

	CALL(ncclCommDestroy(comm));
	free(data.all);
	return accuracy > 0.95f ? 0 : 1;
}
