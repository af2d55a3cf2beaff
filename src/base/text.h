/* Text of others, before it reaches a log. */
#ifndef TP_BASE_TEXT_H
#define TP_BASE_TEXT_H

#include <stddef.h>

/* [bytes]: it ends, and holds neither control characters nor what isn't ASCII. */
static inline void tp_text_clean(char *text, size_t bytes)
{
	text[bytes - 1] = 0;
	for (char *c = text; *c; c++)
		if ((unsigned char)*c < ' ' || (unsigned char)*c >= 0x7f) *c = '?';
}

#endif
