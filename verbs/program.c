/* Which programs the card can be put under. A static program, one of another libc or one that the kernel runs in secure mode
 * would run without our libraries and find no card, or the real one: better to say so before it starts. */
#include <elf.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
#include "verbs/program.h"

#define MAX_HEADERS 512             /* of segments: far more than any program has */
#define MAX_SCRIPTS 4               /* interpreters that are scripts themselves: the kernel's limit */

#if defined(__x86_64__)
static const uint16_t our_machine = EM_X86_64;
#elif defined(__aarch64__)
static const uint16_t our_machine = EM_AARCH64;
#elif defined(__powerpc64__)
static const uint16_t our_machine = EM_PPC64;
#elif defined(__riscv)
static const uint16_t our_machine = EM_RISCV;
#elif defined(__s390x__)
static const uint16_t our_machine = EM_S390;
#else
static const uint16_t our_machine = EM_NONE;
#endif
static const bool our_little_endian = __BYTE_ORDER == __LITTLE_ENDIAN;

/* ---- ELF ---- */

struct fields { bool swap; };
static uint16_t half(struct fields f, uint16_t v) { return f.swap ? __builtin_bswap16(v) : v; }
static uint32_t word(struct fields f, uint32_t v) { return f.swap ? __builtin_bswap32(v) : v; }
static uint64_t wide(struct fields f, uint64_t v) { return f.swap ? __builtin_bswap64(v) : v; }

struct segment { uint32_t type; uint64_t offset, bytes; };

static bool read_segment(bool (*read)(void *, uint64_t, void *, size_t), void *arg, struct fields f, uint8_t bits, uint64_t at, struct segment *out)
{
	union { Elf32_Phdr e32; Elf64_Phdr e64; } header;
	if (!read(arg, at, &header, bits == 32 ? sizeof(header.e32) : sizeof(header.e64)))
		return false;
	if (bits == 32)
		*out = (struct segment){ word(f, header.e32.p_type), word(f, header.e32.p_offset), word(f, header.e32.p_filesz) };
	else
		*out = (struct segment){ word(f, header.e64.p_type), wide(f, header.e64.p_offset), wide(f, header.e64.p_filesz) };
	return true;
}

static int read_interpreter(bool (*read)(void *, uint64_t, void *, size_t), void *arg, const struct segment *segment, struct tp_elf *out)
{
	if (segment->bytes < 2 || segment->bytes > sizeof(out->interpreter) || !read(arg, segment->offset, out->interpreter, (size_t)segment->bytes) ||
		!memchr(out->interpreter, 0, (size_t)segment->bytes)) {
		out->interpreter[0] = 0;
		return EINVAL;
	}
	return 0;
}

int tp_elf_read(bool (*read)(void *arg, uint64_t offset, void *out, size_t bytes), void *arg, struct tp_elf *out)
{
	union { unsigned char ident[EI_NIDENT]; Elf32_Ehdr e32; Elf64_Ehdr e64; } header;
	memset(out, 0, sizeof(*out));
	if (!read(arg, 0, header.ident, EI_NIDENT) || memcmp(header.ident, ELFMAG, SELFMAG))
		return ENOEXEC;
	unsigned char class = header.ident[EI_CLASS], order = header.ident[EI_DATA];
	if ((class != ELFCLASS32 && class != ELFCLASS64) || (order != ELFDATA2LSB && order != ELFDATA2MSB))
		return EINVAL;
	out->bits = class == ELFCLASS32 ? 32 : 64;
	out->little_endian = order == ELFDATA2LSB;
	if (!read(arg, 0, &header, out->bits == 32 ? sizeof(header.e32) : sizeof(header.e64)))
		return EINVAL;
	struct fields f = { .swap = out->little_endian != our_little_endian };
	out->machine = half(f, out->bits == 32 ? header.e32.e_machine : header.e64.e_machine);
	uint16_t type = half(f, out->bits == 32 ? header.e32.e_type : header.e64.e_type);
	uint16_t count = half(f, out->bits == 32 ? header.e32.e_phnum : header.e64.e_phnum);
	uint16_t size = half(f, out->bits == 32 ? header.e32.e_phentsize : header.e64.e_phentsize);
	uint64_t at = out->bits == 32 ? word(f, header.e32.e_phoff) : wide(f, header.e64.e_phoff);
	if ((type != ET_EXEC && type != ET_DYN) || count > MAX_HEADERS || size != (out->bits == 32 ? sizeof(Elf32_Phdr) : sizeof(Elf64_Phdr)))
		return EINVAL;
	for (uint16_t i = 0; i < count; i++) {
		struct segment segment;
		if (at > UINT64_MAX - (uint64_t)MAX_HEADERS * sizeof(Elf64_Phdr) || !read_segment(read, arg, f, out->bits, at + (uint64_t)i * size, &segment))
			return EINVAL;
		if (segment.type == PT_DYNAMIC)
			out->dynamic = true;
		if (segment.type == PT_INTERP) {
			int error = read_interpreter(read, arg, &segment, out);
			if (error)
				return error;
		}
	}
	return 0;
}

/* ---- programs ---- */

static bool read_file(void *arg, uint64_t offset, void *out, size_t bytes)
{
	return offset <= INT64_MAX && pread(*(int *)arg, out, bytes, (off_t)offset) == (ssize_t)bytes;
}

static bool refuse(char *why, size_t bytes, const char *text)
{
	snprintf(why, bytes, "%s", text);
	return false;
}

static bool runs_securely(int fd, const struct stat *info)
{
	char value[64];
	if ((info->st_mode & S_ISUID) && info->st_uid != getuid())
		return true;
	if ((info->st_mode & (S_ISGID | S_IXGRP)) == (S_ISGID | S_IXGRP) && info->st_gid != getgid())
		return true;
	/* Root gains nothing by a file's capabilities. */
	return getuid() != 0 && fgetxattr(fd, "security.capability", value, sizeof(value)) > 0;
}

static bool check_elf(const struct tp_elf *elf, char *why, size_t bytes)
{
	if (elf->machine != our_machine || elf->bits != 8 * sizeof(void *) || elf->little_endian != our_little_endian) {
		snprintf(why, bytes, "it is for another processor (ELF machine %u, %u bits; the card is for machine %u, %zu bits)", elf->machine, elf->bits,
			our_machine, 8 * sizeof(void *));
		return false;
	}
	if (!elf->interpreter[0])
		return refuse(why, bytes, "it is linked statically: no library can be put under it; link it dynamically");
	const char *name = strrchr(elf->interpreter, '/');
	name = name ? name + 1 : elf->interpreter;
	if (!strncmp(name, "ld-musl", 7))
		return refuse(why, bytes, "it is built for musl (Alpine), and the card for glibc; run it in an image with glibc");
	if (strncmp(name, "ld-linux", 8) && strncmp(name, "ld64", 4) && strncmp(name, "ld.so", 5)) {
		snprintf(why, bytes, "its dynamic linker is %s, which isn't glibc's", elf->interpreter);
		return false;
	}
	return true;
}

/* A script's interpreter, from its first line. */
static bool read_script(int fd, char *out, size_t bytes)
{
	char line[256];
	ssize_t got = pread(fd, line, sizeof(line) - 1, 0);
	if (got < 3 || line[0] != '#' || line[1] != '!')
		return false;
	line[got] = 0;
	char *at = line + 2 + strspn(line + 2, " \t");
	at[strcspn(at, " \t\n")] = 0;
	return *at && snprintf(out, bytes, "%s", at) < (int)bytes;
}

static bool check_depth(const char *path, char *why, size_t bytes, int depth)
{
	struct stat info;
	struct tp_elf elf;
	char next[256];
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		/* Executable but not readable: the kernel will start it, in a mode of its own. */
		snprintf(why, bytes, "it can't be read (%s), so nobody can say whether the card would work", strerror(errno));
		return false;
	}
	bool fine = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
	bool script = false;
	if (!fine)
		refuse(why, bytes, "it is no file");
	else if (runs_securely(fd, &info))
		fine = refuse(why, bytes, "it is setuid, setgid or has capabilities, so the dynamic linker ignores LD_PRELOAD and LD_LIBRARY_PATH; "
			"run a copy without them (cp PROGRAM /tmp)");
	else if (read_script(fd, next, sizeof(next)))
		script = true;
	else
		switch (tp_elf_read(read_file, &fd, &elf)) {
		case 0: fine = check_elf(&elf, why, bytes); break;
		case ENOEXEC: break;    /* a script without its first line: the shell's */
		default: fine = refuse(why, bytes, "its ELF header is damaged"); break;
		}
	close(fd);
	if (fine && script)
		return depth < MAX_SCRIPTS ? check_depth(next, why, bytes, depth + 1) : refuse(why, bytes, "its interpreters are scripts without end");
	return fine;
}

bool tp_program_check(const char *path, char *why, size_t bytes) { return check_depth(path, why, bytes, 0); }
