// SPDX-License-Identifier: Apache-2.0
//
// How the batches of posts reach a connection.
//
// Two goroutines post transfers, of BATCHES batches and of one, over one connection that has
// ROOM places; a post has at most LIMIT batches under way. The backend ends batches in any
// order, and makes its descriptor readable then. One goroutine sleeps on that; another polls
// whenever it likes. A third stops the first transfer at any moment. Each statement is one
// step, and so is what stands under a lock, or is one atomic instruction.
//
// ONCE: each batch is submitted exactly once, or left out by a stop; in order. LATE: none is
// submitted once the outcome was told. FORGOTTEN: where no process can go on, each outcome was
// told; with -DFROZEN, where the backend ends nothing, each that was stopped. ORDER (with
// -DORDERED): a transfer that is posted behind another one overtakes it nowhere.
//
// Mistakes: -DNOAGAIN: a goroutine that finds another one submitting for the backlog goes, and
// says nothing. -DNOLOOK: a post rests without another look. -DNORECHECK: nor is there one at a
// stop that has come while the post went into the backlog, and with -DFROZEN a peer that takes
// nothing holds up its Abort.
//
// Not in the model: a transfer that is posted anew while another goroutine looks at its last
// post.
//
// Which code each step is:
//
//   submit, stop: post.go: submit
//   rest, look, wake: backlog.go: parkUntilProgress, resume
//   queue, recheck, take, again: backlog.go: enqueue, drain
//   Poster, Aborter: post.go: Post; deadline.go: interrupt; backlog.go: claim
//   Progress, Poller: lane.go: serve, poll; post.go: finish, where a failure does what
//     Aborter does

#ifndef ROOM
#define ROOM 1
#endif
#ifndef LIMIT
#define LIMIT 1
#endif
#ifndef BATCHES
#define BATCHES 2
#endif
#ifndef POSTS
#define POSTS 1
#endif
#define N 2
#define COUNT(t) (t == 0 -> BATCHES : 1)
#define NONE 9

byte submitted[N];           // index of the next batch
byte out[N];                 // batches with the backend, as the engine sees it
byte remaining[N];           // batches that have not ended
byte taken[N];               // batches that the backend has taken
byte inside[N];              // batches that the backend has
byte ended[N];               // completions that nobody has reaped
bool stopped[N];
bool underWay[N];
bool resting[N];
byte holds = 0;              // of transfer 0
byte posts[N];               // times that it was posted

byte room = ROOM;
bool readable = false;       // the descriptor

byte queue[4];
byte length = 0;
bool busy = false;
bool again = false;
byte waiting = 0;

inline recount() {
	waiting = length + (busy -> 1 : 0)
}

inline removeAt(i) {
	do
	:: i + 1 < length -> queue[i] = queue[i + 1]; i++
	:: else -> break
	od;
	length--
}

// remove takes t out of the backlog.
inline remove(t, i, found) {
	d_step {
		i = 0; found = false;
		do
		:: i < length && queue[i] != t -> i++
		:: else -> break
		od;
		if
		:: i < length -> found = true; removeAt(i); recount()
		:: else
		fi;
		i = 0
	}
}

// wait puts t into the backlog; mine: it was taken out again.
inline wait(t, first, i, mine) {
	d_step { // [queue]
		assert(length < 3);
		i = length;
		do
		:: first && i > 0 -> queue[i] = queue[i - 1]; i--
		:: else -> break
		od;
		queue[i] = t; length++; recount();
		i = 0
	}
	mine = false;
#ifndef NORECHECK
	if // [recheck]
	:: stopped[t] -> remove(t, i, mine)
	:: else
	fi
#endif
}

inline pop(t) {
	again = false;
	busy = length > 0;
	if
	:: busy -> t = queue[0]; i = 0; removeAt(i); i = 0 // [take]
	:: else -> t = NONE
	fi;
	recount()
}

// endOf counts n batches as ended. With the last the outcome is told.
// It is one step.
inline endOf(t, n) {
	assert(underWay[t] && remaining[t] >= n);
	remaining[t] = remaining[t] - n;
	underWay[t] = remaining[t] > 0
}

inline leaveOut(t, i) {
	atomic {
		i = COUNT(t) - submitted[t];
		submitted[t] = COUNT(t);
		endOf(t, i);
		i = 0
	}
}

// accept is a Submit that finds room [submit]. It is one step.
inline accept(t) {
	assert(underWay[t]);                  // LATE
	assert(taken[t] == submitted[t]);     // ONCE
#ifdef ORDERED
	assert(t == 0 || !underWay[0] || taken[0] == COUNT(0) || stopped[0]); // ORDER
#endif
	out[t]++; submitted[t]++; taken[t]++; inside[t]++;
	room--;
	mine = false
}

// submit is Transfer.submit; noRoom: it found none, and t is in the backlog. What reads no
// word that others change, or changes none that they read, is part of the step before it.
inline submit(t, head, noRoom) {
	do
	:: atomic { stopped[t] -> leaveOut(t, i) }; // [stop]
		break
	:: atomic { !stopped[t] && out[t] == LIMIT -> seen = out[t] };
		resting[t] = true; // [rest]
#ifdef NOLOOK
		break
#else
		if // [look]
		:: atomic { (stopped[t] || out[t] != seen) && resting[t] -> resting[t] = false }
		:: else -> break
		fi
#endif
	:: atomic { !stopped[t] && out[t] < LIMIT -> mine = head || waiting == 0 };
		if
		:: atomic { mine && room > 0 && taken[t] + 1 < COUNT(t) -> accept(t) }
		:: atomic { mine && room > 0 && taken[t] + 1 == COUNT(t) -> accept(t) }; break
		:: atomic { !mine || room == 0 -> mine = false };
			wait(t, head, i, mine);
			if
			:: atomic { mine -> mine = false }
			:: atomic { !mine -> noRoom = true }; break
			fi
		fi
	od
}

inline drain(t) {
	d_step {
		if
		:: busy -> t = NONE;
#ifndef NOAGAIN
			again = true // [again]
#endif
		:: else -> pop(t)
		fi
	}
	do
	:: t == NONE -> break
	:: else ->
		submit(t, true, noRoom);
		atomic {
			if
			:: noRoom && !again -> busy = false; t = NONE; recount()
			:: else -> pop(t)
			fi;
			noRoom = false
		}
	od
}

inline post(t) {
	atomic {
		submitted[t] = 0; taken[t] = 0; remaining[t] = COUNT(t); stopped[t] = false;
		underWay[t] = true; posts[t]++
	}
	submit(t, false, noRoom);
	atomic { noRoom = false; readable = true } // it polls, or the goroutine that does looks again
}

proctype Poster(byte t) {
	byte i, seen;
	bool mine, noRoom;
	do
	:: posts[t] < POSTS && !underWay[t] && (t != 0 || holds == 0) -> post(t)
#ifdef ORDERED
		t = 1 // the same goroutine posts the other one next
#endif
	:: posts[t] == POSTS && !underWay[t] -> break
	od
}

proctype Backend() {
#ifdef FROZEN
	false
#endif
end:	do
	:: atomic { inside[0] > 0 -> inside[0]--; ended[0]++; room++; readable = true }
	:: atomic { inside[1] > 0 -> inside[1]--; ended[1]++; room++; readable = true }
	od
}

// endBatch is Engine.finish of one completion.
inline endBatch(t) {
	atomic { ended[t]--; out[t]-- };
	if
	:: atomic { resting[t] -> resting[t] = false }; // [wake]
		wait(t, false, i, mine);
		if
		:: atomic { mine -> leaveOut(t, i); mine = false }
		:: else
		fi
	:: else
	fi;
	atomic { endOf(t, 1) }
}

// Progress sleeps on the descriptor.
proctype Progress() {
	byte i, seen, t;
	bool mine, noRoom;
end:	do
	:: readable ->
		readable = false;
		do
		:: ended[0] > 0 -> endBatch(0)
		:: ended[1] > 0 -> endBatch(1)
		:: else -> break
		od;
		t = NONE;
		drain(t)
	od
}

// Poller is a goroutine that spins: it reaps nothing here, but drains.
proctype Poller() {
	byte i, seen, t;
	bool mine, noRoom;
	t = NONE;
	drain(t)
}

// Aborter is Transfer.stop.
proctype Aborter() {
	byte i;
	bool mine;
	holds++;
	if
	:: atomic { underWay[0] -> stopped[0] = true };
		atomic { mine = resting[0]; resting[0] = false }
		if
		:: !mine -> remove(0, i, mine)
		:: else
		fi;
		if
		:: atomic { mine -> leaveOut(0, i); mine = false }
		:: else
		fi
	:: else
	fi;
	holds--
}

#ifdef FROZEN
#define FORGOTTEN(t) (underWay[t] && inside[t] == 0 && stopped[t])
#else
#define FORGOTTEN(t) underWay[t]
#endif

proctype Watch() {
	timeout -> assert(!FORGOTTEN(0) && !FORGOTTEN(1))
}

init {
	atomic {
		run Poster(0);
#ifndef ORDERED
		run Poster(1);
#endif
		run Backend();
		run Progress();
		run Poller();
		run Aborter();
		run Watch()
	}
}
