// SPDX-License-Identifier: Apache-2.0
//
// What keeps late bytes out where the owner lands them over ucx: tickets for revokes, ages for
// the end of a connection. It is the protocol of tcp_ages.pml; a time by the owner's clock is
// an echo here, the last stamp that came from the owner.
//
// Time is the owner's clock; the initiator's runs alike. Messages take any time, and a
// connection may be cut at any moment, of which only the initiator learns. LATE: no byte lands
// once Revoke has returned, nor once the initiator has told its program that the batch has
// failed.
//
// -DWAITS: the worker looks at the age, and then waits for pages that are being moved. -DEAGER:
// the owner goes by a longer limit before the initiator has confirmed it. Both are late. So is
// -DSTOPPED, a limit as over tcp: a process that is stopped between the look and the copy lands
// one message.
//
// Which code each step is:
//
//   send, hears: send.c: sl_ucx_send; arrive.c: heard
//   fresh, copy: serve.c: sl_ucx_serve_write; ages.c: sl_ucx_age
//   ask, vouch, vouched: ages.c: sl_ucx_ask_confirm, sl_ucx_confirm, sl_ucx_confirmed
//   the last two choices of Initiator: end.c: end, proof_at
//   Revoke, quiesce: memory.c: sl_ucx_revoke: the ticket, then each worker's lock is taken once

#ifndef FRAMES
#define FRAMES 1
#endif
#define GRACE 1   // the larger one of both ends
#define TOP 2     // of the limit
#ifndef MAX
#define MAX 5     // of the clock
#endif

byte now = 2;
byte ticket = 0;
bool lock = false;    // of the owner's worker
bool moving = false;  // pages of the memory
bool revoked = false;

bool sent[FRAMES];
byte echo[FRAMES];
byte stamp = 1;       // the last that the initiator received,
byte heard = 2;       // and when
byte lease = GRACE;   // what the initiator goes by
bool failed = false;  // no more words
bool over = false;    // the program was told that the batch has failed

byte limit = GRACE;   // what the owner goes by
byte confirmed = 0;
bool asking = false;
bool ended = false;   // the owner lands nothing any more

chan confirm = [1] of { byte, byte };    // the owner's time, and a limit
chan confirms = [1] of { byte, byte };   // an echo, and a limit
chan reset = [1] of { bit };
chan farewell = [1] of { bit };

proctype Clock() {
	do
	:: now < MAX -> now++
	:: else -> break
	od
}

// Renew moves pages of the memory; it depends on no landing.
proctype Renew() {
#ifdef WAITS
	moving = true;
	moving = false
#else
	skip // a landing that finds them moving is tried again: that is no step of its own
#endif
}

inline hear(at) {
	heard = now;
	if
	:: at > stamp -> stamp = at
	:: else
	fi
}

proctype Initiator() {
	byte i = 0;
	byte at, longer;
	byte pings = 1;
	do
	:: i < FRAMES && !failed ->
send:		atomic { echo[i] = stamp; sent[i] = true; i++ }
	:: !failed && pings > 0 -> // whatever comes from the owner has a stamp that is past
hears:		atomic {
			pings--;
			if
			:: hear(now)
			:: hear(now - 1)
			fi
		}
	:: !failed && nempty(confirm) ->
vouch:		atomic {
			confirm?at, longer;
			hear(at);
			if
			:: longer > lease -> lease = longer // before the owner hears of it
			:: else
			fi;
			confirms!stamp, lease
		}
	:: !failed -> failed = true; reset!1
	:: failed && farewell?[1] -> over = true; break
	:: failed && now > heard + lease -> over = true; break // proof_at
	od
}

// Landing is one message, held and tried again.
proctype Landing(byte f) {
	byte since;
	byte tries = 0;
	sent[f];
	do
	:: tries < 2 && !ended ->
		tries++;
fresh:		atomic {
			!lock;
			if
			:: ticket != 0 || ended -> goto gone
			:: else
			fi;
			since = echo[f];
			if
			:: confirmed > since -> since = confirmed
			:: else
			fi;
			if
			:: now - since > limit -> goto ask
			:: else ->
#ifdef WAITS
				lock = true; goto wait
#else
copy:				assert(!revoked && !over);
				goto gone
#endif
			fi
		};
#ifdef WAITS
wait:		!moving;
		atomic { assert(!revoked && !over); lock = false; goto gone };
#endif
ask:		atomic {
			if
			:: !asking && !ended ->
				asking = true;
				if
				:: confirm!now, limit
				:: confirm!now, TOP;
#ifdef EAGER
					limit = TOP
#endif
				fi
			:: else
			fi
		};
		confirmed > since || ended
	:: else -> break
	od;
gone:	skip
}

// Arrivals are what the owner's worker takes besides.
proctype Arrivals() {
	byte at, longer;
	do
	:: atomic { !lock && confirms?[at, longer] ->
vouched:	confirms?at, longer;
		if
		:: longer > limit -> limit = longer
		:: else
		fi;
		if
		:: at > confirmed -> confirmed = at
		:: else
		fi;
		asking = false }
	:: atomic { !lock && reset?[1] -> reset?1; ended = true }; farewell!1; break
	od
}

proctype Revoke() {
	if
	:: ticket++;
quiesce:	!lock; // taken once
		revoked = true
	:: skip
	fi
}

init {
	atomic {
		byte f;
		for (f : 0 .. FRAMES-1) { run Landing(f) }
		run Clock();
		run Renew();
		run Initiator();
		run Arrivals();
		run Revoke()
	}
}
