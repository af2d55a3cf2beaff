/* GPU windows, and the host side of NCCL's device interface (nccl_device.h of 2.28.9). Of the latter Telpher has nothing, as its
 * structures are compiled into programs' own kernels; the entry points are here since consumers bind to them, with the original's
 * calling convention: a team is three ints by value, requirements and handles are pointers that are never looked at. */
#include "api/api.h"

typedef struct { int nRanks, rank, stride; } ncclTeam_t;

TP_API(ncclResult_t, ncclCommWindowRegister, (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags));
TP_API(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win));
TP_API(ncclResult_t, ncclDevCommCreate, (ncclComm_t comm, const void *requirements, void *devComm));
TP_API(ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const void *devComm));
TP_API(ncclTeam_t, ncclTeamWorld, (ncclComm_t comm));
TP_API(ncclTeam_t, ncclTeamLsa, (ncclComm_t comm));
TP_API(ncclTeam_t, ncclTeamRail, (ncclComm_t comm));
TP_API(int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank));
TP_API(int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank));
TP_API(ncclResult_t, ncclLsaBarrierCreateRequirement, (ncclTeam_t team, int nBarriers, void *handle, void *requirements));
TP_API(ncclResult_t, ncclGinBarrierCreateRequirement, (ncclComm_t comm, ncclTeam_t team, int nBarriers, void *handle, void *requirements));
TP_API(int, ncclLLA2ACalcSlots, (int maxElts, int maxEltSize));
TP_API(ncclResult_t, ncclLLA2ACreateRequirement, (int nBlocks, int nSlots, void *handle, void *requirements));

#define NOT_HERE(name) TP_FAIL(ncclInvalidUsage, name ": this library has no " WHAT)

ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)
{
	return tp_comm_window_register(comm, buff, size, win, winFlags);
}

ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) { return tp_comm_window_deregister(comm, win); }

#define WHAT "device communicators (NCCL's interface for programs' own kernels)"
ncclResult_t pncclDevCommCreate(ncclComm_t comm, const void *requirements, void *devComm)
{
	(void)requirements, (void)devComm;
	TP_TRY(tp_comm_check(comm, "ncclDevCommCreate"));
	return NOT_HERE("ncclDevCommCreate");
}

ncclResult_t pncclDevCommDestroy(ncclComm_t comm, const void *devComm)
{
	(void)devComm;
	TP_TRY(tp_comm_check(comm, "ncclDevCommDestroy"));
	return NOT_HERE("ncclDevCommDestroy");
}
#undef WHAT

#define WHAT "teams (NCCL's interface for programs' own kernels)"
static ncclTeam_t no_team(ncclResult_t logged)
{
	(void)logged;
	return (ncclTeam_t){ 0, 0, 0 };
}

ncclTeam_t pncclTeamWorld(ncclComm_t comm)
{
	(void)comm;
	return no_team(NOT_HERE("ncclTeamWorld"));
}

ncclTeam_t pncclTeamLsa(ncclComm_t comm)
{
	(void)comm;
	return no_team(NOT_HERE("ncclTeamLsa"));
}

ncclTeam_t pncclTeamRail(ncclComm_t comm)
{
	(void)comm;
	return no_team(NOT_HERE("ncclTeamRail"));
}

int pncclTeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank)
{
	(void)comm, (void)team, (void)rank;
	return no_team(NOT_HERE("ncclTeamRankToWorld")).rank;
}

int pncclTeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank)
{
	(void)comm, (void)team, (void)rank;
	return no_team(NOT_HERE("ncclTeamRankToLsa")).rank;
}
#undef WHAT

#define WHAT "device-side barriers and mailboxes (NCCL's interface for programs' own kernels)"
ncclResult_t pncclLsaBarrierCreateRequirement(ncclTeam_t team, int nBarriers, void *handle, void *requirements)
{
	(void)team, (void)nBarriers, (void)handle, (void)requirements;
	return NOT_HERE("ncclLsaBarrierCreateRequirement");
}

ncclResult_t pncclGinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int nBarriers, void *handle, void *requirements)
{
	(void)comm, (void)team, (void)nBarriers, (void)handle, (void)requirements;
	return NOT_HERE("ncclGinBarrierCreateRequirement");
}

int pncclLLA2ACalcSlots(int maxElts, int maxEltSize)
{
	(void)maxElts, (void)maxEltSize;
	return no_team(NOT_HERE("ncclLLA2ACalcSlots")).rank;
}

ncclResult_t pncclLLA2ACreateRequirement(int nBlocks, int nSlots, void *handle, void *requirements)
{
	(void)nBlocks, (void)nSlots, (void)handle, (void)requirements;
	return NOT_HERE("ncclLLA2ACreateRequirement");
}
