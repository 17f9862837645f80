// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/backends/cuda"
	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
)

// maker opens a backend that a command line can name.
type maker struct {
	name  string
	reach driver.Reach
	cgo   bool // it calls C libraries
	open  func(o openOptions) (driver.Backend, error)
	bench string // the command that measures it, where that is not sluice bench itself
}

// built reports whether this build has it.
func (m *maker) built() bool { return withCgo || !m.cgo }

// opensPort reports whether it opens a port for peers of this host as well, which need none.
func (m *maker) opensPort() bool { return m.name == rdmaName || m.name == tcpName }

// openOptions are what a command line says about how to open backends.
type openOptions struct {
	threads int // that copy
	ucx     ucxFlags
	rdma    rdmaFlags
	tcp     tcpFlags

	elsewhere bool // as if the peer were on another host
	nearOnly  bool // peers of this host alone: no port is opened that was not asked for
}

// makers are in the order of preference where the engine finds no difference.
var makers = []maker{
	{"shm", driver.SameHost, false, func(o openOptions) (driver.Backend, error) {
		return asBackend(shm.New(shm.Config{Workers: o.threads}))
	}, ""},
	{rdmaName, driver.Network, true, func(o openOptions) (driver.Backend, error) {
		return asBackend(rdma.New(o.rdma.config()))
	}, ""},
	{ucxName, driver.Network, true, func(o openOptions) (driver.Backend, error) {
		return asBackend(openUCX(o))
	}, ""},
	{tcpName, driver.Network, false, func(o openOptions) (driver.Backend, error) {
		return asBackend(o.tcp.open())
	}, ""},
	{"mem", driver.InProcess, false, func(o openOptions) (driver.Backend, error) {
		return asBackend(mem.New(mem.Config{Workers: o.threads}))
	}, ""},
	{posixName, driver.InProcess, false, func(openOptions) (driver.Backend, error) {
		return asBackend(posix.New(posix.Config{}))
	}, "sluice bench posix --dir DIR"},
	{"cuda", driver.InProcess, true, func(openOptions) (driver.Backend, error) {
		return asBackend(cuda.New(cuda.Config{}))
	}, "sluice bench gather"},
	{gdsName, driver.InProcess, true, func(openOptions) (driver.Backend, error) {
		return asBackend(gds.New(gds.Config{}))
	}, "sluice bench gds --dir DIR"},
}

func openUCX(o openOptions) (*ucx.Backend, error) {
	cfg := o.ucx.config()
	if o.nearOnly && cfg.Transports == "" {
		cfg.Transports = ucx.NearTransports
	}
	if o.elsewhere {
		var err error
		if cfg, err = cfg.Elsewhere(); err != nil {
			return nil, err
		}
	}
	b, err := ucx.New(cfg)
	if errors.Is(err, driver.ErrUnavailable) && !o.elsewhere && len(o.ucx.given()) == 0 {
		// There is no network, which peers of this host do not need.
		cfg.Transports = ucx.NearTransports
		if near, failed := ucx.New(cfg); failed == nil {
			return near, nil
		}
	}
	return b, err
}

// asBackend keeps a nil pointer from becoming an interface that is not nil.
func asBackend[B driver.Backend](b B, err error) (driver.Backend, error) {
	if err != nil {
		return nil, err
	}
	return b, nil
}

// auto is the name that leaves the choice to the engine.
const auto = "auto"

// backendNames lists what --backend takes, for peers that far apart.
func backendNames(reach driver.Reach) string {
	names := []string{auto}
	for _, m := range makers {
		if m.reach >= reach {
			names = append(names, m.name)
		}
	}
	return strings.Join(names, ", ")
}

// benchNames lists what --backend of sluice bench takes.
func benchNames() string {
	names := []string{auto}
	for _, m := range makers {
		if m.bench == "" {
			names = append(names, m.name)
		}
	}
	return strings.Join(names, ", ")
}

// benchMaker returns the maker with that name, which must move bytes between host memories.
func benchMaker(name string) (maker, error) {
	m, err := findMaker(name, driver.InProcess)
	switch {
	case err != nil:
		return maker{}, usagef("unknown backend %q: there are %s", name, benchNames())
	case m.bench != "":
		return maker{}, usagef("backend %q does not move bytes between two host memories, which "+
			"this command measures: use %s", name, m.bench)
	}
	return m, nil
}

// findMaker returns the maker with that name; a usage error lists the others.
func findMaker(name string, reach driver.Reach) (maker, error) {
	for _, m := range makers {
		if m.name != name {
			continue
		}
		if m.reach < reach {
			return maker{}, usagef("backend %q stays within one process: there are %s", name,
				backendNames(reach))
		}
		return m, nil
	}
	return maker{}, usagef("unknown backend %q: there are %s", name, backendNames(reach))
}

// only is the engine's Route.Only for a --backend.
func only(name string) string {
	if name == auto {
		return ""
	}
	return name
}

// openBackend opens one. What a backend says about its being unavailable needs no
// more words.
func openBackend(m maker, o openOptions) (driver.Backend, error) {
	b, err := m.open(o)
	var missing *driver.UnavailableError
	switch {
	case errors.As(err, &missing):
		return nil, missing
	case err != nil:
		return nil, fmt.Errorf("open backend %s: %w", m.name, err)
	}
	return b, nil
}

// openBackends opens one backend by its name, or with auto all that reach as far
// and work here; it is an error when none does, or when one does not that the
// command line has flags for.
func openBackends(name string, reach driver.Reach, o openOptions) ([]driver.Backend, error) {
	if name != auto {
		m, err := findMaker(name, reach)
		if err != nil {
			return nil, err
		}
		b, err := openBackend(m, o)
		if err != nil {
			return nil, err
		}
		return []driver.Backend{b}, nil
	}
	o.nearOnly = reach <= driver.SameHost && !o.elsewhere && len(o.ucx.given()) == 0
	var list []driver.Backend
	var errs []error
	for _, m := range makers {
		if m.reach < reach || m.opensPort() && reach <= driver.SameHost && !o.elsewhere {
			continue // the ports that it opens were not asked for
		}
		b, err := openBackend(m, o)
		if err == nil {
			list = append(list, b)
			continue
		}
		errs = append(errs, err)
		if m.name == ucxName && len(o.ucx.given()) > 0 {
			return nil, errors.Join(err, closeAll(list))
		}
	}
	if len(list) == 0 {
		return nil, errors.Join(errs...)
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
