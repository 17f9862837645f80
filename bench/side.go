// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// RegionName is the name of a Side's region.
const RegionName = "bench"

// Memory says whose memory a Side registers.
type Memory string

// The two.
const (
	BackendMemory Memory = "backend" // what Engine.Alloc gives: the backend's own, if it has such
	HostMemory    Memory = "host"    // host memory, also where the backend has its own
)

// Side is one end of a Link: an engine with one region.
type Side struct {
	Engine *engine.Engine
	Region *engine.Region
	use    Memory
	memory []*engine.Memory
}

// OpenSide opens an engine with these backends, which it owns from then on, and
// registers that many bytes, faulted in, host memory on huge pages where there are
// some.
func OpenSide(cfg engine.Config, bytes uint64, use Memory) (*Side, error) {
	eng, err := engine.Open(cfg)
	if err != nil {
		return nil, err
	}
	s := &Side{Engine: eng, use: use}
	if s.Region, err = s.register(RegionName, bytes); err != nil {
		return nil, errors.Join(err, eng.Close())
	}
	return s, nil
}

func (s *Side) register(name string, bytes uint64) (*engine.Region, error) {
	alloc := s.Engine.Alloc
	if s.use == HostMemory {
		alloc = engine.Alloc
	}
	memory, err := alloc(bytes, engine.AllocOptions{Purpose: "bench", Populate: true})
	if err != nil {
		return nil, err
	}
	region, err := s.Engine.Register(name, memory.Segment())
	if err != nil {
		return nil, errors.Join(err, memory.Close())
	}
	s.memory = append(s.memory, memory)
	return region, nil
}

// From says where the memory came from: a backend's name, or "host".
func (s *Side) From() string { return s.memory[0].From() }

// Close closes the engine and gives the memory back.
func (s *Side) Close() error {
	err := s.Engine.Close()
	for _, m := range s.memory {
		err = errors.Join(err, m.Close())
	}
	return err
}

// Loop is a Link from an engine to itself, for backends that stay within a
// process, with that many bytes at each end. Close the Side to end it.
func Loop(list []driver.Backend, only string, compact, scattered uint64, use Memory) (*Side, Link,
	error) {
	side, err := OpenSide(engine.Config{Name: "bench", Backends: list}, compact, use)
	if err != nil {
		return nil, Link{}, err
	}
	l, err := side.loop(only, scattered)
	if err != nil {
		return nil, Link{}, errors.Join(err, side.Close())
	}
	return side, l, nil
}

const loopName = "bench-target"

func (s *Side) loop(only string, bytes uint64) (Link, error) {
	if _, err := s.register(loopName, bytes); err != nil {
		return Link{}, err
	}
	self, err := s.Engine.Self()
	if err != nil {
		return Link{}, err
	}
	remote, err := self.Remote(loopName)
	if err != nil {
		return Link{}, err
	}
	return Link{Engine: s.Engine, Peer: self, Local: s.Region, Remote: remote, Only: only,
		Memory: s.From()}, nil
}
