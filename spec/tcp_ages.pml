// SPDX-License-Identifier: Apache-2.0
//
// What keeps late bytes out over tcp: epochs for the owner, ages for the initiator.
//
// Each side has a clock. The owner's may lose a tick against the initiator's, once in DRIFT ticks
// of that; where it gains, bytes are older than the initiator takes them for. Frames and control
// messages take any time, and a connection may be cut at any moment, of which only the initiator
// learns. LATE: no byte lands once Revoke has returned, nor once the initiator has told its program
// that the batch has failed.
//
// The owner's look and the copy behind it are one step here, where the code copies at most
// pieceMax bytes behind one look. -DSTOPPED makes them two, and shows a late byte, which is a
// limit of the protocol: an owner that is stopped there for longer than the limit of ages lands
// those bytes when it goes on, although its initiator has given the batch up. Revoke waits for
// the piece in hand. -DEAGER, -DUNCOUNTED, -DALIKE and -DEXACT are mistakes that must show one,
// too: the owner goes by a longer limit before the initiator has confirmed it, the initiator does
// not count a confirmation as a word, or it does as if the clocks ran alike, when it works out a
// time by the owner's, or when it waits for the end.
//
// Which code each step is:
//
//   send: initiator.go: putNext; frames carry a time by the owner's clock (proof.go: ownerTime)
//   learn: proof.go: noteOwnerClock
//   fresh, copy: landing.go: beginPiece, copyIn; proof.go: freshOrAsk
//   ask, vouch, vouched: proof.go: askIfWanted, confirm, onConfirm
//   the last two choices of Initiator: peer.go: shutDown; proof.go: awaitTooOld
//   stop: the owner lands nothing any more, and says so
//   Revoke: proof.go: the epoch ends under the lock that a piece in hand holds

#ifndef FRAMES
#define FRAMES 1
#endif
#define GRACE 1
#define TOP 2     // of the limit
#ifndef MAX
#define MAX 7     // of the initiator's clock
#endif
#ifndef DRIFT
#define DRIFT 3
#endif

// How far the owner's clock has come at least while the initiator's came so far.
#if DRIFT
#define STEADY(n) ((n) - ((n) + DRIFT - 1) / DRIFT)
#else
#define STEADY(n) (n) // the clocks run alike: for more frames
#endif
#ifdef ALIKE
#define OWNERS(n) (n)
#else
#define OWNERS(n) STEADY(n)
#endif
#ifdef EXACT
#define WAITED(n) (n)
#else
#define WAITED(n) STEADY(n)
#endif

byte now = 2;         // by the owner's clock,
byte here = 2;        // and by the initiator's
byte even = DRIFT;    // ticks of here since the owner's lost one
byte told = 1;        // the last time of the owner's that the initiator has,
byte learned = 2;     // and since when
byte epoch = 0;
bool gate = false;    // of the memory: a piece is in hand, or Revoke ends the epoch
bool revoked = false;

byte stamps[FRAMES];  // of frames that were sent; 0: none
byte lastSent = 0;
byte grace = GRACE;   // what the initiator goes by
bool failed = false;  // no more words
bool over = false;    // the program was told that the batch has failed

byte limit = GRACE;   // what the owner goes by
byte confirmed = 0;
byte asked = 0;
bool ended = false;   // the owner lands nothing any more

chan challenge = [1] of { byte, byte }; // the owner's time, the limit
chan confirm = [1] of { byte, byte };
chan stop = [1] of { bit };
chan stopped = [1] of { bit };

proctype Clock() {
	do
	:: atomic { here < MAX -> now++; here++; even = (even < DRIFT -> even + 1 : DRIFT) }
#if DRIFT
	:: atomic { here < MAX && even + 1 >= DRIFT -> here++; even = 0 } // the owner's loses one
#endif
	:: here == MAX -> break
	od
}

proctype Initiator() {
	byte i = 0;
	byte at, longer;
	bool answered = false;
	do
	:: i < FRAMES && !failed ->
		// A stamp is a time by the owner's clock that is past.
#if DRIFT
send:		atomic { stamps[i] = told + OWNERS(here - learned); lastSent = here; i++ }
	:: !answered && !failed ->
learn:		atomic { told = now; learned = here; answered = true }
#else
		atomic {
			if
			:: stamps[i] = now
			:: stamps[i] = now - 1
			fi;
			lastSent = here;
			i++
		}
#endif
	:: !failed && challenge?[at, longer] ->
vouch:		atomic {
			challenge?at, longer;
			if
			:: longer > grace -> grace = longer // before the owner hears of it
			:: else
			fi;
#ifndef UNCOUNTED
			lastSent = here;
#endif
			confirm!at, longer
		}
	:: !failed -> failed = true; stop!1
	:: failed && stopped?[1] -> over = true; break
	:: failed && WAITED(here - lastSent) > grace -> over = true; break // awaitTooOld
	od
}

// Reader lands one frame.
proctype Reader(byte f) {
	byte since;
	byte tries = 0;
	stamps[f] != 0;
	do
	:: tries < 2 && !ended ->
		tries++;
		!gate;
fresh:		atomic {
			since = stamps[f];
			if
			:: confirmed > since -> since = confirmed
			:: else
			fi;
			if
			:: (now <= since || now - since <= limit) && !gate ->
				gate = true;
				if
				:: epoch != 0 || ended -> gate = false; goto gone
				:: else
				fi
#ifdef STOPPED
			:: else -> goto ask
			fi
		};
copy:		atomic { assert(!revoked && !over); gate = false; goto gone };
#else
				;
copy:				assert(!revoked && !over);
				gate = false;
				goto gone
			:: else
			fi
		};
#endif
ask:		atomic {
			if
			:: asked == 0 && !ended ->
				asked = now;
				if
				:: challenge!now, limit
				:: challenge!now, TOP;
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

// Control takes what comes by the control connection.
proctype Control() {
	byte at, longer;
	do
	:: confirm?[at, longer] ->
vouched:	atomic {
			confirm?at, longer;
			if
			:: longer > limit -> limit = longer
			:: else
			fi;
			if
			:: at > confirmed -> confirmed = at
			:: else
			fi;
			asked = 0
		}
	:: stop?[1] -> stop?1; !gate; ended = true; stopped!1; break
	od
}

proctype Revoke() {
	if
	:: atomic { !gate -> epoch++ }; // waits for the piece in hand
		revoked = true
	:: skip
	fi
}

init {
	atomic {
		byte f;
		for (f : 0 .. FRAMES-1) { run Reader(f) }
		run Clock();
		run Initiator();
		run Control();
		run Revoke()
	}
}
