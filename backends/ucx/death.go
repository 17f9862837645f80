// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/park"
	"github.com/sluicehq/sluice/internal/process"
)

// deaths watches the processes of near peers. A process is watched once, by a
// goroutine that sleeps in the runtime's poller and holds no thread, however many
// connections lead there.
type deaths struct {
	self  process.ID
	tasks sync.WaitGroup

	mu      sync.Mutex
	watches map[process.ID]*watch // nil once closed
}

// watch is one process, and the ends that want to know of its death.
type watch struct {
	process process.ID
	waiter  *park.Waiter
	who     map[mortal]struct{} // deaths.mu
}

// mortal is one end of a connection, told once that the other process has ended.
// It must not block.
type mortal interface{ died() }

func (d *deaths) init(self process.ID) { d.self, d.watches = self, make(map[process.ID]*watch) }

// close ends all watches. No end is told anything afterwards.
func (d *deaths) close() {
	d.mu.Lock()
	for _, w := range d.watches {
		d.forget(w)
	}
	d.watches = nil
	d.mu.Unlock()
	d.tasks.Wait()
}

// add has m told. An error says that the process has ended, or cannot be watched;
// our own needs no watch.
func (d *deaths) add(p process.ID, m mortal) error {
	if p == d.self {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watches == nil {
		return driver.ErrClosed
	}
	w := d.watches[p]
	if w == nil {
		var err error
		if w, err = newWatch(p); err != nil {
			return err
		}
		d.watches[p] = w
		d.tasks.Go(func() { d.await(w) })
	}
	w.who[m] = struct{}{}
	return nil
}

func newWatch(p process.ID) (*watch, error) {
	fd, err := p.Open()
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) // the waiter has its own
	waiter, err := park.NewWaiter(fd)
	if err != nil {
		return nil, err
	}
	if waiter.Ready() {
		return nil, errors.Join(p.Ended(), waiter.Close())
	}
	return &watch{process: p, waiter: waiter, who: make(map[mortal]struct{})}, nil
}

// await tells all once the process has ended. It returns early when no end wants
// to know any more.
func (d *deaths) await(w *watch) {
	if w.waiter.Wait() != nil {
		return
	}
	d.mu.Lock()
	who := w.who
	w.who = nil
	d.forget(w)
	d.mu.Unlock()
	for m := range who {
		m.died()
	}
}

// remove takes m off the list; it may be told still.
func (d *deaths) remove(p process.ID, m mortal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.watches[p]
	if w == nil {
		return
	}
	delete(w.who, m)
	if len(w.who) == 0 {
		d.forget(w)
	}
}

// forget ends a watch. Preconditions: d.mu is held.
func (d *deaths) forget(w *watch) {
	if d.watches[w.process] == w {
		delete(d.watches, w.process)
	}
	_ = w.waiter.Close() // await ends by it
}
