/* Names of those whom the connection manager's messages are for (cm_name.h). */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "verbs/cm_name.h"

bool tp_cm_name_of_mad(const struct tp_cm_mad *mad, struct tp_cm_name *out)
{
	if (tp_cm_rej_of_request(mad)) {
		*out = tp_cm_name_of_number((uint32_t)(mad->transaction >> 32));
		return true;
	}
	if (tp_cm_rej_of_peer(mad))
		return false;
	if (mad->kind != TP_CM_REQ && mad->kind != TP_CM_SIDR_REQ) {
		*out = tp_cm_name_of_number(mad->kind == TP_CM_SIDR_REP ? mad->local_id : mad->remote_id);
		return true;
	}
	*out = (struct tp_cm_name){ .port = true, .space = (uint16_t)(mad->service_id >> 16), .number = (uint16_t)mad->service_id };
	return mad->service_id >> 32 == 0;
}

socklen_t tp_cm_name_address(const struct tp_cm_name *name, struct sockaddr_un *out)
{
	memset(out, 0, sizeof(*out));
	out->sun_family = AF_UNIX;
	char *text = out->sun_path + 1;
	size_t room = sizeof(out->sun_path) - 1;
	int length = name->port ? snprintf(text, room, "telpher-verbs/1/%u/port/%x/%u", geteuid(), name->space, name->number) :
		snprintf(text, room, "telpher-verbs/1/%u/process/%x", geteuid(), name->number);
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}
