// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"regexp"
	"slices"
)

// ofGate is the name of a test of the gate.
func ofGate(name string) bool { return ofTest.MatchString(name) && !otherTier.MatchString(name) }

var (
	ofTest    = regexp.MustCompile(`^Test([^a-z]|$)`)
	otherTier = regexp.MustCompile(`^Test(Timed|Soak|Real|Main$)`)
)

// tiers keeps tests beside a stopped process out of the gate. That a short limit does no harm to a
// test is beyond a look at its text: make stall shows it.
func tiers(f *File) []Finding {
	stops := slices.ContainsFunc(f.imports(), func(i imported) bool {
		return i.local == "internal/testing/freeze"
	})
	if !f.isTest() || !stops || f.under("internal/testing", suite) {
		return nil
	}
	var found []Finding
	for _, decl := range f.tree.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if ok && fn.Recv == nil && ofGate(fn.Name.Name) {
			found = append(found, f.at(fn.Pos(), "%s stands in a file that stops processes: call "+
				"it TestTimed… or TestSoak…, or move it into another file", fn.Name.Name))
		}
	}
	return found
}
