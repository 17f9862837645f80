// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/ownfiles"
)

// mover hands requests to the kernel: io_uring, or threads.
type mover interface {
	// put, cancel, reap and listen are called with flights.Mu held and make no system call.
	put(r *request)          // never more than Config.Depth at a time
	cancel(r *request)       // asks for its end; it lands all the same
	reap(out []landing) int  // takes what has landed
	listen(need, armed bool) // whether landings are to be served, and whether a caller sleeps
	// whether what was reaped just now has woken the sleeper, or is about to
	tells() bool
	fixedBuffers() int32    // the registered buffer that the requests' are in, or -1
	kick()                  // has the kernel begin what was put; without the lock
	pending() bool          // whether there is something to reap; without the lock
	addFile(f *file) error  // makes a file known, where that is of use
	dropFile(f *file) error // no request of it is left; after an error it may be called again
	pin(mem []byte) pin     // registers memory, where that is of use
	unpin(p *pin) error     // as dropFile
	close() error           // nothing is in flight
}

// landing is what became of a request.
type landing struct {
	r   *request
	res int // bytes, or minus an errno
}

// reapMax is how many landings are handled under one hold of the lock.
const reapMax = 32

// serve handles what has landed and begins what there is room for.
func (b *Backend) serve() {
	rung := b.doubt.Load()
	if rung > 0 && !readable(b.event.FD()) {
		rung = 0
	}
	b.flights.Mu.Lock()
	t := b.takeTray()
	list := t[:b.mover.reap(t[:])]
	told, armings := b.mover.tells() && len(list) > 0, b.armings.Load()
	if told {
		b.noteTold(rung)
	}
	scatter := false
	for _, l := range list {
		scatter = scatter || l.scatters()
	}
	if scatter { // without the lock: the requests are still ours, and so are their jobs
		b.flights.Mu.Unlock()
		for i, l := range list {
			if l.scatters() && l.r.scatter() != nil {
				list[i].res = -int(unix.EFAULT)
			}
		}
		b.flights.Mu.Lock()
		// a caller that has armed meanwhile saw neither the landing nor its job's end
		told = told && b.armings.Load() == armings
	}
	for i, l := range list {
		b.land(l)
		list[i] = landing{}
	}
	b.trays = append(b.trays, t)
	b.flights.News = b.flights.News && !told
	b.flights.Pump()
	b.leave()
}

// noteTold notes that the kernel tells the sleeper of what was reaped, or is about to. It may
// stop to do so when it has: when the event is found signalled at a later landing, with no
// Arm in between (rung). Until then it is not known whether the sleeper has taken the signal, or it
// is still to come.
func (b *Backend) noteTold(rung uint64) {
	if rung > 0 && rung == b.doubt.Load() {
		b.doubt.Store(0)
		b.armed.Store(false)
		return
	}
	b.doubt.Store(b.armings.Load())
}

// tray holds landings while they are served. There are as many as have ever been in use at
// once.
type tray [reapMax]landing

func (b *Backend) takeTray() *tray {
	n := len(b.trays)
	if n == 0 {
		return new(tray)
	}
	t := b.trays[n-1]
	b.trays = b.trays[:n-1]
	return t
}

// scatters reports whether all has come that is to be scattered.
func (l *landing) scatters() bool {
	return l.r.bounce && l.res > 0 && l.r.done+uint64(l.res) >= l.r.need
}

// leave gives the lock up, and then does what must not be done under it.
func (b *Backend) leave() {
	b.listen()
	news := b.flights.News
	b.flights.News = false
	b.flights.Mu.Unlock()
	if news {
		b.wake()
	}
	b.mover.kick()
}

// listen has landings served that cannot wait for Poll, or wakes the sleeper.
//
// Preconditions: flights.Mu is held.
func (b *Backend) listen() {
	more := b.flights.Queued() || b.durables > 0
	b.mover.listen(more || b.flights.Waited(), b.armed.Load())
}

// first implements ownfiles.Config.
func (b *Backend) first() {
	b.relaunch()
	b.beginSyncs()
}

func (b *Backend) launch(r *request) {
	if r.kind == writeFrom {
		r.f.inode.writing[r.access()]++
	}
	b.mover.put(r)
}

// relaunch hands requests over once more. One that is of another kind now, through the page
// cache in place of past it, waits until those past it have ended.
func (b *Backend) relaunch() {
	kept := b.again[:0]
	for _, r := range b.again {
		switch {
		case r.kind == syncFile:
			b.launch(r)
		case !r.f.inode.mayRelaunch(r):
			kept = append(kept, r)
		default:
			if r.kind == writeFrom {
				r.f.inode.waiting[r.access()]--
			}
			b.launch(r)
		}
	}
	clear(b.again[len(kept):])
	b.again = kept
}

// land handles the end of a request, which may be the beginning of another try.
func (b *Backend) land(l landing) {
	r := l.r
	if r.kind == writeFrom {
		r.f.inode.writing[r.access()]--
	}
	again, err := r.judge(l.res)
	if again {
		if b.again = append(b.again, r); r.kind == writeFrom {
			r.f.inode.waiting[r.access()]++
		}
		return
	}
	j, inode, sync := r.j, r.inode, r.kind == syncFile
	r.release()
	b.free = append(b.free, r)
	if sync {
		b.synced(inode, err)
		return
	}
	b.flights.Landed(&j.Job, err)
}

// room implements ownfiles.Config.
func (b *Backend) room() bool { return len(b.free) > 0 }

// begin implements ownfiles.Config.
func (b *Backend) begin(of *ownfiles.Job[extent]) bool {
	r := b.cut(&b.jobs[of.Slot])
	if r != nil {
		b.launch(r)
	}
	return r != nil
}

// finish implements ownfiles.Config: a durable job asks for its syncs first.
func (b *Backend) finish(of *ownfiles.Job[extent]) bool {
	j := &b.jobs[of.Slot]
	if j.syncs > 0 {
		return false
	}
	if j.Err == nil && j.durable && !j.synced {
		b.askSyncs(j)
		b.beginSyncs()
		return false
	}
	for i := range j.Views {
		if n := j.Views[i].Remote.Extent.file.inode; n.turn == j {
			n.turn = nil
		}
	}
	if j.durable {
		b.durables--
	}
	return true
}

// stop ends requests of jobs that have failed, and begins no more of them.
//
// Preconditions: flights.Mu is held.
func (b *Backend) stop() {
	for i := range b.requests {
		if r := &b.requests[i]; r.j != nil && r.j.Err != nil && !r.ending.Load() {
			r.ending.Store(true)
			b.mover.cancel(r)
		}
	}
	b.flights.Pump()
}

// readable reports whether an eventfd is signalled.
func readable(fd int) bool {
	poll := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(poll[:], 0)
	return n == 1 && err == nil
}
