// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

// Package nvml calls NVML, NVIDIA's library that manages cards. The library is opened at run time,
// and each function is looked up by its name before it is called: drivers differ in what they have.
package nvml

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

// The forms of the functions. f is what dlsym gave, d a device.
static int do_(void *f) { return ((int (*)(void))f)(); }
static const char *word(void *f, int r) { return ((const char *(*)(int))f)(r); }
static int text(void *f, char *to, unsigned n) { return ((int (*)(char *, unsigned))f)(to, n); }
static int value(void *f, void *to) { return ((int (*)(void *))f)(to); }
static int device(void *f, unsigned i, void **to) { return ((int (*)(unsigned, void **))f)(i, to); }
static int device_text(void *f, void *d, char *to, unsigned n)
{
	return ((int (*)(void *, char *, unsigned))f)(d, to, n);
}
static int device_value(void *f, void *d, void *to) { return ((int (*)(void *, void *))f)(d, to); }
static int device_pair(void *f, void *d, unsigned *a, unsigned *b)
{
	return ((int (*)(void *, unsigned *, unsigned *))f)(d, a, b);
}
static int device_set(void *f, void *d, unsigned n, unsigned long *to, unsigned scope)
{
	return ((int (*)(void *, unsigned, unsigned long *, unsigned))f)(d, n, to, scope);
}
*/
import "C"

import (
	"errors"
	"unsafe"
)

// Success is the answer of a call that did what it was asked for; Missing that of one that this
// library has not (NVML's own for it).
const (
	Success = 0
	Missing = 13
)

// textMax is room for every text of NVML.
const textMax = 96

// Library is one that is open, for good.
type Library struct{ handle unsafe.Pointer }

// Open opens a library by its path or name.
func Open(path string) (*Library, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	handle := C.dlopen(name, C.RTLD_NOW|C.RTLD_LOCAL|C.RTLD_NODELETE)
	if handle == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	return &Library{handle}, nil
}

func (l *Library) find(function string) unsafe.Pointer {
	name := C.CString(function)
	defer C.free(unsafe.Pointer(name))
	return C.dlsym(l.handle, name)
}

// Has reports whether the library has a function.
func (l *Library) Has(function string) bool { return l.find(function) != nil }

// with calls a function, if the library has it.
func (l *Library) with(function string, call func(f unsafe.Pointer) C.int) int {
	f := l.find(function)
	if f == nil {
		return Missing
	}
	return int(call(f))
}

// Word is what NVML says of an answer.
func (l *Library) Word(answer int) string {
	f := l.find("nvmlErrorString")
	if f == nil {
		return "unknown error"
	}
	return C.GoString(C.word(f, C.int(answer)))
}

// Do calls a function of no arguments.
func (l *Library) Do(function string) int {
	return l.with(function, func(f unsafe.Pointer) C.int { return C.do_(f) })
}

// Text calls one that gives a text.
func (l *Library) Text(function string) (string, int) {
	var to [textMax]C.char
	answer := l.with(function, func(f unsafe.Pointer) C.int { return C.text(f, &to[0], textMax-1) })
	return C.GoString(&to[0]), answer
}

// Number calls one that gives a number.
func (l *Library) Number(function string) (int, int) {
	var n C.int
	answer := l.with(function, func(f unsafe.Pointer) C.int {
		return C.value(f, unsafe.Pointer(&n))
	})
	return int(n), answer
}

// Device is one card of the library.
type Device struct {
	library *Library
	handle  unsafe.Pointer
}

// Device calls one that gives the card of a number.
func (l *Library) Device(function string, index int) (Device, int) {
	d := Device{library: l}
	answer := l.with(function, func(f unsafe.Pointer) C.int {
		var to unsafe.Pointer
		rc := C.device(f, C.uint(index), &to)
		d.handle = to
		return rc
	})
	return d, answer
}

// Text calls one that gives a text about the card.
func (d Device) Text(function string) (string, int) {
	var to [textMax]C.char
	answer := d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_text(f, d.handle, &to[0], textMax-1)
	})
	return C.GoString(&to[0]), answer
}

// Number calls one that gives a number.
func (d Device) Number(function string) (int, int) {
	var n C.int
	answer := d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_value(f, d.handle, unsafe.Pointer(&n))
	})
	return int(n), answer
}

// Pair calls one that gives two numbers.
func (d Device) Pair(function string) (a, b, answer int) {
	var n [2]C.uint
	answer = d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_pair(f, d.handle, &n[0], &n[1])
	})
	return int(n[0]), int(n[1]), answer
}

// Nodes calls one that gives a set of NUMA nodes of so many words.
func (d Device) Nodes(function string, words int) ([]uint, int) {
	set := make([]C.ulong, words)
	answer := d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_set(f, d.handle, C.uint(words), &set[0], 0)
	})
	list := make([]uint, words)
	for i, w := range set {
		list[i] = uint(w)
	}
	return list, answer
}

// Bus calls one that gives the domain, bus and device of PCI.
func (d Device) Bus(function string) (domain, bus, device uint32, answer int) {
	var info struct { // of v3; those before it are shorter
		legacy              [16]byte
		domain, bus, device uint32
		id, subsystem       uint32
		text                [32]byte
	}
	answer = d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_value(f, d.handle, unsafe.Pointer(&info))
	})
	return info.domain, info.bus, info.device, answer
}

// Memory calls one that gives the bytes of all memory, and of that which is free.
func (d Device) Memory(function string) (total, free uint64, answer int) {
	var m struct{ total, free, used uint64 }
	answer = d.library.with(function, func(f unsafe.Pointer) C.int {
		return C.device_value(f, d.handle, unsafe.Pointer(&m))
	})
	return m.total, m.free, answer
}
