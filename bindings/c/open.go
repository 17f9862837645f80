// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/ring"
)

// openEngine is the object of an engine handle.
type openEngine struct {
	*engine.Engine
	handle uint64
	gone   chan struct{} // closed as the engine begins to close

	speaks   bool               // over networks, by certificates or in plain text
	identity *identity.Identity // nil: without certificates
	accepts  chan *engine.Peer  // unbuffered: the server of a peer waits for its acceptor
	ended    endings
	inbox    inbox
	hearing  hearing

	mu    sync.Mutex // guards what follows
	over  bool
	known map[*engine.Peer]uint64 // handles
}

//export slgoOpen
func slgoOpen(c *C.struct_sluice_config, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e := &openEngine{gone: make(chan struct{}), accepts: make(chan *engine.Peer),
		known: map[*engine.Peer]uint64{}}
	e.inbox.init()
	cfg, err := configOf(c)
	if err != nil {
		return answer(f, err)
	}
	cfg.OnPeer, e.speaks = e.welcome, cfg.Identity != nil || cfg.Plaintext
	e.identity = cfg.Identity
	if cfg.Backends, err = openBackends(c); err != nil {
		return answer(f, err)
	}
	if e.Engine, err = engine.Open(cfg); err != nil {
		return answer(f, err)
	}
	if e.handle, err = engines.put(e); err != nil {
		return answer(f, errors.Join(err, e.Engine.Close()))
	}
	*out = C.uint64_t(e.handle)
	return C.SLUICE_OK
}

func configOf(c *C.struct_sluice_config) (engine.Config, error) {
	if c.flags&^(C.SLUICE_PLAINTEXT|C.SLUICE_SCHEDULE) != 0 {
		return engine.Config{}, argument("sluice_config.flags is %#x: there are "+
			"SLUICE_PLAINTEXT and SLUICE_SCHEDULE", c.flags)
	}
	var schedule *engine.Schedule
	if c.flags&C.SLUICE_SCHEDULE != 0 {
		schedule = &engine.Schedule{}
	}
	id, err := identityOf(c)
	if err != nil {
		return engine.Config{}, err
	}
	if c.description_max > 1<<30 {
		return engine.Config{}, fmt.Errorf("sluice_config.description_max is %d, at most %d: %w",
			c.description_max, 1<<30, engine.ErrBounds)
	}
	return engine.Config{
		Name:             C.GoString(c.name),
		Identity:         id,
		Plaintext:        c.flags&C.SLUICE_PLAINTEXT != 0,
		Schedule:         schedule,
		TransferTimeout:  time.Duration(c.transfer_timeout_ns),
		AbortGrace:       time.Duration(c.abort_grace_ns),
		ConnectTimeout:   time.Duration(c.connect_timeout_ns),
		HandshakeTimeout: time.Duration(c.handshake_timeout_ns),
		Spin:             time.Duration(c.spin_ns),
		StagingBytes:     int64(c.staging_bytes),
		DescriptionMax:   int(c.description_max),
		TransfersMax:     int(c.transfers_max),
		RegionsMax:       int(c.regions_max),
		LeasesMax:        int(c.leases_max),
		PeersMax:         int(c.peers_max),
		NotificationsMax: int(c.notifications_max),
		HandshakesMax:    int(c.handshakes_max),
	}, nil
}

// identityOf reads the certificates that the config names. It returns nil if it names none.
func identityOf(c *C.struct_sluice_config) (*identity.Identity, error) {
	if c.cert_file == nil && c.key_file == nil && c.ca_file == nil {
		return nil, nil
	}
	if c.cert_file == nil || c.key_file == nil || c.ca_file == nil {
		return nil, argument("sluice_config.cert_file, key_file and ca_file go together")
	}
	return identity.FromFiles(C.GoString(c.cert_file), C.GoString(c.key_file),
		C.GoString(c.ca_file))
}

// openBackends opens the backends that the config names. It opens none on an error.
func openBackends(c *C.struct_sluice_config) ([]driver.Backend, error) {
	named, err := inPlace[C.struct_sluice_backend](c.backends, uint64(c.backends_count),
		"sluice_config.backends")
	if err != nil {
		return nil, err
	}
	var list []driver.Backend
	var missing []error
	for i := range named {
		n := &named[i]
		if n.name == nil || n.flags&^C.SLUICE_OPTIONAL != 0 || n.reserved != 0 {
			err = argument("sluice_config.backends[%d]: it has no name, or flags that do not exist",
				i)
			return nil, errors.Join(err, closeAll(list))
		}
		b, err := byname.Open(C.GoString(n.name), stringList(n.options))
		if errors.Is(err, engine.ErrUnavailable) && n.flags&C.SLUICE_OPTIONAL != 0 {
			missing = append(missing, err)
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open backend %s: %w", C.GoString(n.name), err),
				closeAll(list))
		}
		list = append(list, b)
	}
	if len(list) == 0 && missing != nil {
		return nil, errors.Join(missing...)
	}
	return list, nil
}

func closeAll(list []driver.Backend) error {
	var errs []error
	for _, b := range list {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

// adopt returns a handle for an object of an engine, unless the engine is closing.
func adopt[T any](e *openEngine, t *table[T], v *T) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return 0, engine.ErrClosed
	}
	return t.put(v)
}

//export slgoClose
func slgoClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return answer(f, e.close())
}

// slgoExit closes all engines when the process ends by exit, and rings, whose sockets have files.
//
//export slgoExit
func slgoExit() {
	var closing sync.WaitGroup
	for _, e := range engines.dropAll(func(*openEngine) bool { return true }) {
		closing.Go(func() { _ = e.close() }) // the program has ended
	}
	for _, w := range rings.dropAll(func(*ring.Writer) bool { return true }) {
		closing.Go(func() { _ = w.Close() })
	}
	closing.Wait()
}

// close closes the engine and drops the handles of all its objects. A second caller waits for the
// end, too.
func (e *openEngine) close() error {
	e.mu.Lock()
	first := !e.over
	e.over = true
	e.mu.Unlock()
	if first {
		close(e.gone)
	}
	// before the engine that moves their blocks
	cached, handed := e.closeCaches(), e.closeHandoffs()
	err := errors.Join(cached, handed, e.Engine.Close())
	listeners.dropAll(func(l *listener) bool { return l.of == e })
	transfers.dropAll(func(t *transfer) bool { return t.of == e })
	for _, s := range steps.dropAll(func(s *sparseStep) bool { return s.pool.of == e }) {
		s.closeWake()
	}
	pools.dropAll(func(p *sparsePool) bool { return p.of == e })
	leases.dropAll(func(l *lease) bool { return l.of == e })
	remotes.dropAll(func(r *remote) bool { return r.of.of == e })
	peers.dropAll(func(p *peer) bool { return p.of == e })
	for _, r := range regions.dropAll(func(r *region) bool { return r.of == e }) {
		if !errors.Is(err, engine.ErrUnproven) { // else bytes may land there still
			r.release()
		}
	}
	engines.drop(e.handle)
	return errors.Join(err, e.ended.close(), e.inbox.close())
}

// statsJSON is the JSON of sluice_stats.
type statsJSON struct {
	Posted        int         `json:"posted"`
	Regions       int         `json:"regions"`
	Peers         int         `json:"peers"`
	Leases        int         `json:"leases"`
	Stray         uint64      `json:"stray"`
	Notifications int         `json:"notifications"`
	Routes        []routeJSON `json:"routes"`
}

type routeJSON struct {
	Peer      string            `json:"peer"`
	Engine    string            `json:"engine"`
	Backend   string            `json:"backend"`
	Transfers uint64            `json:"transfers"`
	Bytes     uint64            `json:"bytes"`
	Errors    map[string]uint64 `json:"errors"`
	P50       time.Duration     `json:"p50_ns"`
	P99       time.Duration     `json:"p99_ns"`
	Rate      float64           `json:"rate"` // bytes a second; 0: not known yet
}

//export slgoStats
func slgoStats(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	s := e.Stats()
	out := statsJSON{Posted: s.Posted, Regions: s.Regions, Peers: s.Peers, Leases: s.Leases,
		Stray: s.Stray, Notifications: s.Notifications, Routes: []routeJSON{}}
	for _, r := range s.Routes {
		out.Routes = append(out.Routes, routeJSON{Peer: r.Peer, Engine: r.Engine,
			Backend: r.Backend, Transfers: r.Transfers, Bytes: r.Bytes,
			Errors: r.Errors, P50: r.Latency.Quantile(0.5), P99: r.Latency.Quantile(0.99),
			Rate: r.Rate})
	}
	return handJSON(out, buffer, capacity, length, f)
}
