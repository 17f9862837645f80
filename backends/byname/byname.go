// SPDX-License-Identifier: Apache-2.0

// Package byname opens backends by name and options, for the command and the bindings to other
// languages. The options of a backend are the fields of its Config: RingBytes is ring_bytes.
package byname

import (
	"reflect"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
)

// Backend describes a backend that Open can open.
type Backend struct {
	Name  string
	Reach driver.Reach // how far away its peers may be
	Cgo   bool         // it calls C libraries: a build without cgo does not have it

	open   func(options []string) (driver.Backend, error)
	config reflect.Type
}

// all is in order of preference: an engine prefers the first of equally good backends.
var all = []Backend{
	backend("shm", driver.SameHost, false, shm.New),
	backend("rdma", driver.Network, true, rdma.New),
	backend("ucx", driver.Network, true, ucx.New),
	backend("tcp", driver.Network, false, newTCP),
	backend("mem", driver.InProcess, false, mem.New),
	backend("posix", driver.InProcess, false, newPosix),
	backend("cuda", driver.InProcess, true, newCUDA),
	backend("gds", driver.InProcess, true, gds.New),
}

// backend describes a backend with the Config C, which newBackend opens.
func backend[C any, B driver.Backend](name string, reach driver.Reach, cgo bool,
	newBackend func(C) (B, error)) Backend {
	return Backend{name, reach, cgo, func(options []string) (driver.Backend, error) {
		var cfg C
		if err := SetOptions(&cfg, options); err != nil {
			return nil, err
		}
		b, err := newBackend(cfg)
		if err != nil {
			return nil, err // b is a nil pointer, which would make an interface that is not nil
		}
		return b, nil
	}, reflect.TypeFor[C]()}
}

// All returns the backends in order of preference.
func All() []Backend { return slices.Clone(all) }

// Check checks NAME:OPTION=VALUE,... without opening anything. Its errors are *Error.
func Check(spec string) error {
	name, options, err := Split(spec)
	if err != nil {
		return err
	}
	b, err := find(name)
	if err != nil {
		return err
	}
	return SetOptions(reflect.New(b.config).Interface(), options)
}

// Open opens a backend with options such as "ring_bytes=65536". For an unknown name or option, or
// an invalid value, the error is an *Error that lists the valid ones. If the backend is not in this
// build, or this machine lacks something that it needs, the error is a *driver.UnavailableError
// that says how to get it. Other errors are those of the backend's New.
func Open(name string, options []string) (driver.Backend, error) {
	b, err := find(name)
	if err != nil {
		return nil, err
	}
	return b.open(options)
}

func find(name string) (Backend, error) {
	names := make([]string, len(all))
	for i, b := range all {
		if b.Name == name {
			return b, nil
		}
		names[i] = b.Name
	}
	slices.Sort(names)
	return Backend{}, Errorf("backend %q does not exist: there are %s", name,
		strings.Join(names, ", "))
}

// Fields maps the name of each field of a Config to that of its option. Errors of backends name the
// field.
func Fields() map[string]string {
	names := map[string]string{}
	for _, b := range all {
		for _, f := range reflect.VisibleFields(b.config) {
			names[f.Name] = OptionName(f.Name)
		}
	}
	return names
}
