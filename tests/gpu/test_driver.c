/* src/gpu/driver.h says what cuda.h says: constants, layouts, and the type of every function. Needs a cuda.h of 13.0. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#if __has_include(<cuda.h>)
#define __CUDA_API_VERSION_INTERNAL     /* cuda.h: each version of a function under its own name */
#include <cuda.h>
#endif

#if defined(CUDA_VERSION) && CUDA_VERSION >= 13000
#include "gpu/driver.h"
#include "gpu/driver_facts.h"

static const struct driver_fact theirs[] = DRIVER_FACTS;

static void test_constants_sizes_and_places_are_cudas(void **state)
{
	(void)state;
	for (int i = 0; theirs[i].name; i++) {
		assert_string_equal(theirs[i].name, driver_facts_ours[i].name);
		if (theirs[i].value != driver_facts_ours[i].value)
			fail_msg("%s is %lld, ours is %lld", theirs[i].name, theirs[i].value, driver_facts_ours[i].value);
	}
}

struct function { const char *name; int same; };
#define FUNCTION(name, symbol, parameters) { #symbol, __builtin_types_compatible_p(__typeof__(symbol), CUresult parameters) },
static const struct function functions[] = { TP_CUDA_FUNCTIONS(FUNCTION, FUNCTION) };

static void test_functions_have_cudas_types(void **state)
{
	(void)state;
	for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
		if (!functions[i].same) fail_msg("%s is declared otherwise in cuda.h", functions[i].name);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_constants_sizes_and_places_are_cudas),
		cmocka_unit_test(test_functions_have_cudas_types),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void)
{
	puts("no cuda.h of 13.0 or newer: nothing to compare with");
	return 77;
}
#endif
