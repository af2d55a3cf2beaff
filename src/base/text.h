/* Text of others, before it reaches a log. */
#ifndef TP_BASE_TEXT_H
#define TP_BASE_TEXT_H

#include <stddef.h>

/* Bytes of the character that begins here, as UTF-8; 0: none does, or it is one that controls a terminal. */
static inline size_t tp_text_char(const char *text)
{
	const unsigned char *c = (const unsigned char *)text;
	size_t n = *c < 0x80 ? 1 : *c >= 0xc2 && *c < 0xe0 ? 2 : *c >= 0xe0 && *c < 0xf0 ? 3 : *c >= 0xf0 && *c < 0xf5 ? 4 : 0;

	if (n == 1) return *c >= ' ' && *c != 0x7f;
	for (size_t i = 1; i < n; i++)
		if (c[i] < 0x80 || c[i] > 0xbf) return 0;
	/* Longer than it need be, half of a pair of UTF-16, or beyond the last. */
	if ((c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xed && c[1] > 0x9f) || (c[0] == 0xf0 && c[1] < 0x90) || (c[0] == 0xf4 && c[1] > 0x8f)) return 0;
	return n == 2 && c[0] == 0xc2 && c[1] < 0xa0 ? 0 : n;
}

/* [bytes]: it ends, and what isn't text, or controls a terminal, becomes a question mark. */
static inline void tp_text_clean(char *text, size_t bytes)
{
	text[bytes - 1] = 0;
	for (char *c = text; *c;) {
		size_t n = tp_text_char(c);
		if (n == 0) *c = '?';
		c += n ? n : 1;
	}
}

#endif
