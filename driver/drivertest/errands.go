// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"sync"
	"time"
)

// errands are the goroutines that checks start beside themselves. They use memory of both sides,
// and may outlive a check that fails: one that has waited for a call up to its limit, say.
var errands gang

// errandsMax is how long a check that is over waits for its errands. Only a hang meets it.
const errandsMax = 20 * time.Second

// gang counts goroutines, and keeps memory from being freed while one of them runs.
type gang struct {
	mu    sync.Mutex
	n     int
	none  chan struct{}  // closed when n comes back to 0
	frees []func() error // to be done then
}

// run starts a goroutine.
func (g *gang) run(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n == 0 {
		g.none = make(chan struct{})
	}
	g.n++
	go func() {
		defer g.end()
		f()
	}()
}

func (g *gang) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n > 0 {
		return
	}
	for _, free := range g.frees {
		_ = free()
	}
	g.frees = nil
	close(g.none)
}

// afterwards frees memory as soon as no goroutine runs. It returns the error of free, or nil if
// that comes later.
func (g *gang) afterwards(free func() error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n > 0 {
		g.frees = append(g.frees, free)
		return nil
	}
	return free()
}

// wait waits until no goroutine runs. It returns how many still do after the limit.
func (g *gang) wait(limit time.Duration) int {
	g.mu.Lock()
	n, none := g.n, g.none
	g.mu.Unlock()
	if n == 0 {
		return 0
	}
	select {
	case <-none:
		return 0
	case <-time.After(limit):
		return n
	}
}
