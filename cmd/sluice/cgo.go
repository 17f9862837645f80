// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

// withCgo reports whether this build has the backends that call C libraries.
var withCgo = true
