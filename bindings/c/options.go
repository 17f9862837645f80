// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
)

// makers open a backend with options; their names are what sluice_backend.name takes.
var makers = []struct {
	name string
	open func(options []string) (driver.Backend, error)
}{
	{"cuda", func(o []string) (driver.Backend, error) { return open(newCUDA, o) }},
	{"gds", func(o []string) (driver.Backend, error) { return open(gds.New, o) }},
	{"mem", func(o []string) (driver.Backend, error) { return open(mem.New, o) }},
	{"posix", func(o []string) (driver.Backend, error) { return open(newPosix, o) }},
	{"rdma", func(o []string) (driver.Backend, error) { return open(rdma.New, o) }},
	{"shm", func(o []string) (driver.Backend, error) { return open(shm.New, o) }},
	{"tcp", func(o []string) (driver.Backend, error) { return open(newTCP, o) }},
	{"ucx", func(o []string) (driver.Backend, error) { return open(ucx.New, o) }},
}

// openBackend opens one by its name.
func openBackend(name string, options []string) (driver.Backend, error) {
	names := make([]string, len(makers))
	for i, m := range makers {
		if m.name == name {
			return m.open(options)
		}
		names[i] = m.name
	}
	return nil, argument("backend %q does not exist: there are %s", name, strings.Join(names, ", "))
}

// open fills a Config of the backend's from options.
func open[C any, B driver.Backend](make func(C) (B, error), options []string) (driver.Backend,
	error) {
	var cfg C
	if err := configure(reflect.ValueOf(&cfg).Elem(), options); err != nil {
		return nil, err
	}
	b, err := make(cfg)
	if err != nil {
		return nil, err // b is a nil pointer, which would make an interface that is not nil
	}
	return b, nil
}

// configure sets fields of a Config: "ring_bytes=65536" is RingBytes. A field that is
// a list takes one element an option.
func configure(cfg reflect.Value, options []string) error {
	for _, o := range options {
		name, value, found := strings.Cut(o, "=")
		if !found {
			return argument("option %q: write it as name=value", o)
		}
		field, names := findField(cfg, name)
		if !field.IsValid() {
			return argument("option %q does not exist: there are %s", name,
				strings.Join(names, ", "))
		}
		if err := setField(field, value); err != nil {
			return argument("option %s: %v", o, err)
		}
	}
	return nil
}

// findField returns the field of that name, and the names of all that can be set.
func findField(cfg reflect.Value, name string) (field reflect.Value, names []string) {
	for _, f := range reflect.VisibleFields(cfg.Type()) {
		if f.Anonymous || !f.IsExported() || !canSet(f.Type) {
			continue
		}
		names = append(names, optionName(f.Name))
		if optionName(f.Name) == name {
			field = cfg.FieldByIndex(f.Index)
		}
	}
	return field, names
}

// optionName writes RingBytes as ring_bytes, and MTU as mtu.
func optionName(field string) string {
	var b strings.Builder
	lower := false
	for _, r := range field {
		if unicode.IsUpper(r) && lower {
			b.WriteByte('_')
		}
		lower = unicode.IsLower(r)
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// setters parse a value into a field, by the field's type.
var setters = map[reflect.Type]func(field reflect.Value, value string) error{
	reflect.TypeFor[string](): func(f reflect.Value, v string) error {
		f.SetString(v)
		return nil
	},
	reflect.TypeFor[[]string](): func(f reflect.Value, v string) error {
		f.Set(reflect.Append(f, reflect.ValueOf(v)))
		return nil
	},
	reflect.TypeFor[time.Duration](): parsed(time.ParseDuration),
	reflect.TypeFor[bool]():          parsed(strconv.ParseBool),
	reflect.TypeFor[int]():           parsed(strconv.Atoi),
	reflect.TypeFor[uint64](): parsed(func(v string) (uint64, error) {
		return strconv.ParseUint(v, 10, 64)
	}),
	reflect.TypeFor[[]int](): func(f reflect.Value, v string) error {
		n, err := strconv.Atoi(v)
		f.Set(reflect.Append(f, reflect.ValueOf(n)))
		return err
	},
}

func parsed[T any](parse func(string) (T, error)) func(reflect.Value, string) error {
	return func(field reflect.Value, value string) error {
		v, err := parse(value)
		field.Set(reflect.ValueOf(v))
		return err
	}
}

func canSet(t reflect.Type) bool { return setters[t] != nil }

func setField(field reflect.Value, value string) error {
	return setters[field.Type()](field, value)
}
