// SPDX-License-Identifier: Apache-2.0

// Package spec holds models of the protocols that keep late bytes out, and the test that has
// spin check them. See README.md.
package spec
