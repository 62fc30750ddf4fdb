"""What renting costs in simulation: ways to scale and choose, over real spot prices and presence."""
