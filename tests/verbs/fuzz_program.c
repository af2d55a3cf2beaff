/* A program's file is anybody's: reading its headers must never go wrong. */
#include <string.h>
#include "verbs/program.h"

struct file { const uint8_t *data; size_t bytes; };

static bool read_at(void *arg, uint64_t offset, void *out, size_t bytes)
{
	const struct file *file = arg;
	if (offset > file->bytes || bytes > file->bytes - offset)
		return false;
	memcpy(out, file->data + offset, bytes);
	return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct file file = { data, bytes };
	struct tp_elf elf;
	if (tp_elf_read(read_at, &file, &elf) == 0 && strnlen(elf.interpreter, sizeof(elf.interpreter)) == sizeof(elf.interpreter))
		__builtin_trap();
	return 0;
}
