/* Names of a port's counters, as mlx5 has them in sysfs (counters/ and hw_counters/). */
#include "verbs/internal.h"

static const char *const names[TP_CNT_COUNT] = {
	[TP_CNT_PORT_XMIT_DATA] = "port_xmit_data", [TP_CNT_PORT_RCV_DATA] = "port_rcv_data",
	[TP_CNT_PORT_XMIT_PACKETS] = "port_xmit_packets", [TP_CNT_PORT_RCV_PACKETS] = "port_rcv_packets",
	[TP_CNT_UNICAST_XMIT] = "unicast_xmit_packets", [TP_CNT_UNICAST_RCV] = "unicast_rcv_packets",
	[TP_CNT_MULTICAST_XMIT] = "multicast_xmit_packets", [TP_CNT_MULTICAST_RCV] = "multicast_rcv_packets",
	[TP_CNT_PORT_RCV_ERRORS] = "port_rcv_errors", [TP_CNT_PORT_XMIT_DISCARDS] = "port_xmit_discards",
	[TP_CNT_PORT_XMIT_WAIT] = "port_xmit_wait", [TP_CNT_LINK_DOWNED] = "link_downed",
	[TP_CNT_DUPLICATE_REQUEST] = "duplicate_request", [TP_CNT_IMPLIED_NAK_SEQ_ERR] = "implied_nak_seq_err",
	[TP_CNT_LOCAL_ACK_TIMEOUT_ERR] = "local_ack_timeout_err", [TP_CNT_NP_CNP_SENT] = "np_cnp_sent",
	[TP_CNT_NP_ECN_MARKED] = "np_ecn_marked_roce_packets", [TP_CNT_OUT_OF_BUFFER] = "out_of_buffer",
	[TP_CNT_OUT_OF_SEQUENCE] = "out_of_sequence", [TP_CNT_PACKET_SEQ_ERR] = "packet_seq_err",
	[TP_CNT_REQ_CQE_ERROR] = "req_cqe_error", [TP_CNT_REQ_CQE_FLUSH_ERROR] = "req_cqe_flush_error",
	[TP_CNT_REQ_REMOTE_ACCESS_ERRORS] = "req_remote_access_errors",
	[TP_CNT_REQ_REMOTE_INVALID_REQUEST] = "req_remote_invalid_request",
	[TP_CNT_RESP_CQE_ERROR] = "resp_cqe_error", [TP_CNT_RESP_CQE_FLUSH_ERROR] = "resp_cqe_flush_error",
	[TP_CNT_RESP_LOCAL_LENGTH_ERROR] = "resp_local_length_error",
	[TP_CNT_RESP_REMOTE_ACCESS_ERRORS] = "resp_remote_access_errors", [TP_CNT_RNR_NAK_RETRY_ERR] = "rnr_nak_retry_err",
	[TP_CNT_ROCE_ADP_RETRANS] = "roce_adp_retrans", [TP_CNT_ROCE_SLOW_RESTART] = "roce_slow_restart",
	[TP_CNT_RP_CNP_HANDLED] = "rp_cnp_handled", [TP_CNT_RP_CNP_IGNORED] = "rp_cnp_ignored",
	[TP_CNT_RX_ATOMIC_REQUESTS] = "rx_atomic_requests", [TP_CNT_RX_ICRC_ENCAPSULATED] = "rx_icrc_encapsulated",
	[TP_CNT_RX_READ_REQUESTS] = "rx_read_requests", [TP_CNT_RX_WRITE_REQUESTS] = "rx_write_requests",
};

const char *tp_counter_name(enum tp_counter counter) { return names[counter]; }
