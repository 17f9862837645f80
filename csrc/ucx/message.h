/* SPDX-License-Identifier: Apache-2.0 */
/* The messages between two backends over UCX: active messages with this header. */
#ifndef SLUICE_UCX_MESSAGE_H
#define SLUICE_UCX_MESSAGE_H

#include "abi.h"

#define SL_UCX_AM 21	  /* the id of all of them */
#define SL_UCX_VERSION 4 /* of this file; ends that differ do not talk */
/*
 * What one message carries, or asks for. It is eager: TCP's segments, of 64 KiB, have room for the
 * headers of UCX and ours beside it.
 */
#define SL_UCX_BODY_MAX (60u << 10)

enum {
	SL_UCX_MSG_CONTROL = 1, /* data is Go's */
	/*
	 * data lands at off; with count rows, as the table in front says and from off of the
	 * message on
	 */
	SL_UCX_MSG_WRITE,
	SL_UCX_MSG_ACK,		/* of writes up to seq; status, if that one failed */
	/* len bytes at off; with count rows, from the places in the table */
	SL_UCX_MSG_READ,
	SL_UCX_MSG_DATA,	/* the answer, to seq */
	/* the message of a batch; not delivered if a piece of it failed */
	SL_UCX_MSG_NOTIFY,
	SL_UCX_MSG_CREDIT,	/* value messages were received */
	SL_UCX_MSG_STARVED,	/* for want of credit */
	SL_UCX_MSG_PING,	/* says that we are there, and our stamp */
	SL_UCX_MSG_ASK,		/* for an acknowledgement of writes up to seq */
	/* the other end is over: nothing that comes by it lands any more */
	SL_UCX_MSG_RESET,
	/* is what you sent before still wanted? It was on its way for longer than Grace */
	SL_UCX_MSG_CONFIRM,
	SL_UCX_MSG_CONFIRMED	/* it is */
};

enum {
	SL_UCX_FIRST = 1,    /* of a batch */
	SL_UCX_ASK = 2,	     /* for an acknowledgement */
	SL_UCX_CHECKED = 8   /* a notification to deliver only if its batch arrived whole */
};

/* Both ends are of one byte order: the first control message says which. */
struct sl_ucx_head {
	uint8_t version, type;
	uint16_t flags;
	uint32_t seq;
	uint64_t conn; /* the end it is for; 0: none yet */
	uint64_t ticket;
	uint64_t off; /* or the value of what has no place */
	uint64_t len;
	uint32_t key, count;
	int32_t status;
	uint32_t zero; /* no byte is left to chance */
	uint64_t stamp; /* the sender's clock */
	/*
	 * the last stamp that it has from the receiver, by which that knows how old this is at most
	 */
	uint64_t echo;
};

/* A row of the table in front of the data of a scattered message. */
struct sl_ucx_place {
	uint64_t off;
	uint64_t len;
};

/* A message until UCX lets go of it. */
struct sl_ucx_message {
	struct sl_ucx_message *next; /* of the free ones */
	struct sl_ucx_conn *conn;
	struct sl_ucx_head head;
	uint32_t len; /* of body in use */
	uint8_t large;
	uint8_t counted; /* of a record */
	_Alignas(16) uint8_t body[]; /* a table stands at its front */
};

#endif
