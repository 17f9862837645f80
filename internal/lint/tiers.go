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
	stops := false
	selectors(f.tree, func(x *ast.Ident, sel *ast.SelectorExpr) {
		stops = stops || x.Name == "testkit" && sel.Sel.Name == "Freeze"
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

// skipper is the one function that may skip a test, since it looks at the error.
const skipper = "SkipIfUnavailable"

// skips wants a test to run, or to say which library the machine lacks.
func skips(f *File) []Finding {
	tests := []string{"t", "b", "f", "tb"}
	calls := []string{"Skip", "Skipf", "SkipNow"}
	var found []Finding
	for _, decl := range f.tree.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if ok && fn.Name.Name == skipper && f.dir() == suite {
			continue
		}
		selectors(decl, func(x *ast.Ident, sel *ast.SelectorExpr) {
			if slices.Contains(tests, x.Name) && slices.Contains(calls, sel.Sel.Name) {
				found = append(found, f.at(sel.Pos(),
					"%s.%s: make the test run, or call drivertest.%s(t, err)", x.Name, sel.Sel.Name,
					skipper))
			}
		})
	}
	return found
}

// selectors visits each x.y where x is a plain name.
func selectors(root ast.Node, visit func(x *ast.Ident, sel *ast.SelectorExpr)) {
	ast.Inspect(root, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok {
				visit(x, sel)
			}
		}
		return true
	})
}
