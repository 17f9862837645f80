// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Looks. In an exchange of small frames the next one comes within some 20 µs, and a thread that
// sleeps wakes no sooner. So a reading goroutine looks for it for a moment before it sleeps: for as
// long as an exchange takes whose ends sleep, two slow wake-ups of them, or it would never meet the
// first answer. Where that was in vain, as beside a program that computes or a peer that is far
// away, it sleeps at once the next times: 2 times, then 4, up to 256.

const (
	lookTime   = 250 * time.Microsecond
	looksMax   = 8       // goroutines that look at once
	roundsMax  = 1 << 10 // calls of the kernel by one of them
	restsShift = 8       // 1<<restsShift bounds the times without a look
)

// look is what a reading goroutine remembers from one look to the next.
type look struct {
	fd    int32
	until time.Time
	word  chan lookWord // one place

	misses int  // looks in vain, less those that were not
	rests  int  // times that it still sleeps at once
	handed bool // it has woken a goroutine, which is to run first
}

type lookWord int

const (
	lookOver lookWord = iota
	lookCame
	lookForAll // ask the kernel from now on
)

// looks are the reading goroutines of a backend that look. One asks the kernel for all: of a
// program that reads two connections in turn, two that look take the processors from its peer.
type looks struct {
	mu    sync.Mutex // guards list
	list  []*look
	asked []unix.PollFd // of the goroutine that asks alone
}

// look reports whether there is something to read, perhaps after a while. It looks between frames
// alone, of the connection for small batches.
func (c *conn) look(fd int) bool {
	l := &c.in.look
	handed := l.handed
	l.handed = false
	if !c.in.readIdle || c.index != express {
		return false
	}
	if l.rests > 0 {
		l.rests--
		return false
	}
	if handed {
		runtime.Gosched()
	}
	if c.b.looks.wait(l, fd) {
		l.misses = max(0, l.misses-1)
		return true
	}
	l.misses = min(l.misses+1, restsShift)
	l.rests = 1 << l.misses
	return false
}

func (k *looks) wait(l *look, fd int) bool {
	if l.word == nil {
		l.word = make(chan lookWord, 1)
	}
	l.fd, l.until = int32(fd), time.Now().Add(lookTime)
	k.mu.Lock()
	n := len(k.list)
	if n < looksMax {
		k.list = append(k.list, l)
	}
	k.mu.Unlock()
	if n == looksMax {
		return false
	}
	if n > 0 {
		if w := <-l.word; w != lookForAll {
			return w == lookCame
		}
	}
	for round := 1; ; round++ {
		k.mu.Lock()
		k.asked = k.asked[:0]
		for _, x := range k.list {
			k.asked = append(k.asked, unix.PollFd{Fd: x.fd, Events: unix.POLLIN})
		}
		k.mu.Unlock()
		_, _ = unix.Poll(k.asked, 0) // an error leaves Revents 0
		if over, came := k.tell(l, round == roundsMax); over {
			return came
		}
	}
}

// tell takes those off the list for whom something has come, or whose time is over: of all if last.
// It reports whether the goroutine that asks is among them, which passes that on to another.
func (k *looks) tell(asks *look, last bool) (over, came bool) {
	now, told := time.Now(), false
	k.mu.Lock()
	left := k.list[:0]
	for i, x := range k.list {
		asked, w := i < len(k.asked), lookOver
		if asked && k.asked[i].Revents != 0 {
			w = lookCame
		}
		switch {
		case !asked || w == lookOver && !last && now.Before(x.until):
			left = append(left, x)
		case x == asks:
			over, came = true, w == lookCame
		default:
			x.word <- w
			told = true
		}
	}
	clear(k.list[len(left):])
	if k.list = left; over && len(left) > 0 {
		left[0].word <- lookForAll
	}
	k.mu.Unlock()
	if told && !over {
		runtime.Gosched()
	}
	return over, came
}
