/* Can a program run on the software card? It must be one that the dynamic linker of this libc loads, with our libraries in front. */
#ifndef TP_VERBS_PROGRAM_H
#define TP_VERBS_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What an ELF file says of itself. Nothing in it is believed. */
struct tp_elf {
	uint8_t bits;                   /* 32 or 64 */
	bool little_endian;
	uint16_t machine;               /* EM_* */
	bool dynamic;                   /* needs a dynamic linker */
	char interpreter[256];          /* that linker; "" where there is none */
};
/* read gives bytes at an offset, all or none of them. 0; ENOEXEC: no program in ELF; EINVAL: one that is damaged. */
int tp_elf_read(bool (*read)(void *arg, uint64_t offset, void *out, size_t bytes), void *arg, struct tp_elf *out);

/* True if the program at path (found already) can; else why not, as a sentence's end: "it is linked statically, so …". Scripts
 * are judged by their interpreter. */
bool tp_program_check(const char *path, char *why, size_t bytes);

#endif
