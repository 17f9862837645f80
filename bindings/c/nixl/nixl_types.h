/* SPDX-License-Identifier: Apache-2.0 */
/* The names of NIXL's API for C++ programs that run over sluice: see nixl.h. */
#ifndef SLUICE_NIXL_TYPES_H
#define SLUICE_NIXL_TYPES_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

class nixlSerDes;
class nixlDlistH;
class nixlBackendH;
class nixlXferReqH;
class nixlAgentData;

enum class nixl_api_version : unsigned int { V1 = 1 };
inline constexpr nixl_api_version nixlApiVersionV1 = nixl_api_version::V1;

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };

enum nixl_status_t {
	NIXL_IN_PROG = 1,
	NIXL_SUCCESS = 0,
	NIXL_ERR_NOT_POSTED = -1,
	NIXL_ERR_INVALID_PARAM = -2,
	NIXL_ERR_BACKEND = -3,
	NIXL_ERR_NOT_FOUND = -4,
	NIXL_ERR_MISMATCH = -5,
	NIXL_ERR_NOT_ALLOWED = -6,
	NIXL_ERR_REPOST_ACTIVE = -7,
	NIXL_ERR_UNKNOWN = -8,
	NIXL_ERR_NOT_SUPPORTED = -9,
	NIXL_ERR_REMOTE_DISCONNECT = -10,
	NIXL_ERR_CANCELED = -11,
	NIXL_ERR_NO_TELEMETRY = -12
};

/* Of no effect: any thread may call an agent at any time. */
enum class nixl_thread_sync_t {
	NIXL_THREAD_SYNC_NONE,
	NIXL_THREAD_SYNC_STRICT,
	NIXL_THREAD_SYNC_RW,
	NIXL_THREAD_SYNC_DEFAULT = NIXL_THREAD_SYNC_NONE
};

enum class nixl_cost_t { ANALYTICAL_BACKEND = 0 };

namespace nixlEnumStrings
{

inline std::string memTypeStr(const nixl_mem_t &mem)
{
	static const char *const names[] = {"DRAM_SEG", "VRAM_SEG", "BLK_SEG", "OBJ_SEG",
					    "FILE_SEG"};
	return mem >= DRAM_SEG && mem <= FILE_SEG ? names[mem] : "BAD_SEG";
}

inline std::string xferOpStr(const nixl_xfer_op_t &op)
{
	return op == NIXL_READ ? "READ" : op == NIXL_WRITE ? "WRITE" : "BAD_OP";
}

inline std::string statusStr(const nixl_status_t &status)
{
	switch (status) {
	case NIXL_IN_PROG: return "NIXL_IN_PROG";
	case NIXL_SUCCESS: return "NIXL_SUCCESS";
	case NIXL_ERR_NOT_POSTED: return "NIXL_ERR_NOT_POSTED";
	case NIXL_ERR_INVALID_PARAM: return "NIXL_ERR_INVALID_PARAM";
	case NIXL_ERR_BACKEND: return "NIXL_ERR_BACKEND";
	case NIXL_ERR_NOT_FOUND: return "NIXL_ERR_NOT_FOUND";
	case NIXL_ERR_MISMATCH: return "NIXL_ERR_MISMATCH";
	case NIXL_ERR_NOT_ALLOWED: return "NIXL_ERR_NOT_ALLOWED";
	case NIXL_ERR_REPOST_ACTIVE: return "NIXL_ERR_REPOST_ACTIVE";
	case NIXL_ERR_UNKNOWN: return "NIXL_ERR_UNKNOWN";
	case NIXL_ERR_NOT_SUPPORTED: return "NIXL_ERR_NOT_SUPPORTED";
	case NIXL_ERR_REMOTE_DISCONNECT: return "NIXL_ERR_REMOTE_DISCONNECT";
	case NIXL_ERR_CANCELED: return "NIXL_ERR_CANCELED";
	case NIXL_ERR_NO_TELEMETRY: return "NIXL_ERR_NO_TELEMETRY";
	}
	return "BAD_STATUS";
}

} // namespace nixlEnumStrings

using nixl_backend_t = std::string;
using nixl_blob_t = std::string;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_notifs_t = std::unordered_map<std::string, std::vector<nixl_blob_t>>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using nixlMemViewH = void *;
using chrono_point_t = std::chrono::steady_clock::time_point;
using chrono_period_us_t = std::chrono::microseconds;
using nixl_etcd_deletion_callback_t =
	std::function<nixl_status_t(const std::string &remote_agent, void *user_data)>;

constexpr int default_comm_port = 8888;
inline const std::string default_metadata_label = "metadata";
inline const std::string default_partial_metadata_label = "partial_metadata";

/* The local side of prepXferDlist; and an owner that is none, which keeps a place in a list. */
#define NIXL_INIT_AGENT ""
inline const std::string nixl_null_agent = "NULL_AGENT";

/* Options of the calls. Those that nixl.h does not name have no effect. */
struct nixlAgentOptionalArgs {
	std::vector<nixlBackendH *> backends;
	std::optional<nixl_blob_t> notif; /* a message that follows the bytes */
	nixl_blob_t notifMsg;             /* the same where hasNotif says so */
	bool hasNotif = false;
	bool skipDescMerge = false;
	bool includeConnInfo = false;
	std::string ipAddr;
	int port = default_comm_port;
	std::string metadataLabel;
	nixl_blob_t customParam;
	nixl_mem_t initiatorMemType = VRAM_SEG;
};
using nixl_opt_args_t = nixlAgentOptionalArgs;

struct nixlXferTelemetry {
	chrono_point_t startTime;
	chrono_period_us_t postDuration;
	chrono_period_us_t xferDuration; /* until getXferStatus has seen the end */
	size_t totalBytes;
	size_t descCount;
};
using nixl_xfer_telem_t = nixlXferTelemetry;

#endif
