// SPDX-License-Identifier: Apache-2.0
//
// What keeps late bytes out over tcp: epochs for the owner, ages for the initiator.
//
// Time is the owner's clock; the initiator's runs alike. Frames and control messages take any
// time, and a connection may be cut at any moment, of which only the initiator learns. LATE: no
// byte lands once Fence has returned, nor once the initiator has told its program that the
// batch has failed.
//
// The owner's look and the copy behind it are one step here, where the code copies at most
// handMax bytes behind one look. -DSTOPPED makes them two, and shows a late byte, which is a
// limit of the protocol: an owner that is stopped there for longer than the limit of ages lands
// those bytes when it goes on, although its initiator has given the batch up. Fence waits for
// the piece in hand. -DEAGER and -DUNCOUNTED are mistakes that must show one, too: the owner
// goes by a longer limit before the initiator has confirmed it, or the initiator does not count
// a confirmation as a word.
//
// Which code each step is:
//
//   send: send.go: frames carry a time by the owner's clock that is past (clock.go: stamp)
//   fresh, copy: receive.go: enter, fill; grace.go: fresh
//   ask, vouch, vouched: grace.go: challenge, confirm, vouched
//   the last two choices of Initiator: close.go: part, outlive
//   stop: the owner lands nothing any more, and says so
//   Fence: memory.go: the epoch ends under the lock that a piece in hand holds

#ifndef FRAMES
#define FRAMES 1
#endif
#define GRACE 1
#define TOP 2     // of the limit
#ifndef MAX
#define MAX 5     // of the clock
#endif

byte now = 2;
byte epoch = 0;
bool gate = false;    // of the memory: a piece is in hand, or Fence ends the epoch
bool fenced = false;

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
	:: now < MAX -> now++
	:: else -> break
	od
}

proctype Initiator() {
	byte i = 0;
	byte at, longer;
	do
	:: i < FRAMES && !failed ->
		// A stamp is a time by the owner's clock that is past.
send:		atomic {
			if
			:: stamps[i] = now
			:: stamps[i] = now - 1
			fi;
			lastSent = now;
			i++
		}
	:: !failed && challenge?[at, longer] ->
vouch:		atomic {
			challenge?at, longer;
			if
			:: longer > grace -> grace = longer // before the owner hears of it
			:: else
			fi;
#ifndef UNCOUNTED
			lastSent = now;
#endif
			confirm!at, longer
		}
	:: !failed -> failed = true; stop!1
	:: failed && stopped?[1] -> over = true; break
	:: failed && now > lastSent + grace -> over = true; break // outlive
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
			:: now - since <= limit && !gate ->
				gate = true;
				if
				:: epoch != 0 || ended -> gate = false; goto gone
				:: else
				fi
#ifdef STOPPED
			:: else -> goto ask
			fi
		};
copy:		atomic { assert(!fenced && !over); gate = false; goto gone };
#else
				;
copy:				assert(!fenced && !over);
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

proctype Fence() {
	if
	:: atomic { !gate -> epoch++ }; // waits for the piece in hand
		fenced = true
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
		run Fence()
	}
}
